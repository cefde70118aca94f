"""Fixes that are the same in every case of a failure."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_console.diagnosis.failure.rules import Topic
from vllm_console.diagnosis.finding import Cause, Fix
from vllm_launchers.vllm.flags.changes import Changes


def advice(why: str, tradeoff: str = "") -> Fix:
    """A fix that changes no flag."""
    return Fix(Changes(), why, tradeoff)


_START_AGAIN = advice("Start it again; --restart on-failure does so automatically.")

ADVICE: Mapping[Cause | Topic, tuple[Fix, ...]] = {
    Cause.GATED: (advice("Accept the model's terms on the Hub, then export HF_TOKEN with a token of that account."),),
    Cause.KILLED: (
        advice("Check 'dmesg | grep -i kill': if the kernel killed it, the machine's main memory ran out."),
        _START_AGAIN,
    ),
    Cause.INTERRUPTED: (_START_AGAIN,),
    Cause.DRIVER: (
        advice("Run nvidia-smi: if it fails, the driver is the problem (reboot after an upgrade)."),
        advice("If it works, use a vLLM build for the CUDA version that nvidia-smi shows, or a newer driver."),
    ),
    Cause.TRUST_REMOTE_CODE: (
        Fix(
            Changes({"trust-remote-code": True}),
            "The model ships its own code.",
            "Code from the model's repository runs as you: read it first, and pin --revision.",
        ),
    ),
    Cause.NODES_DIFFER: (
        advice("Use the same vLLM, the same model files and the same flags on every node; give flags with --set."),
        advice("Node 0 keeps waiting after it refused a node: correct that one and start it again."),
    ),
    Topic.NODE_MISSING: (
        advice("Start every node with the same command and its own --node-rank, within the time they wait."),
        advice(
            "Check from the other nodes that node 0 can be reached at --master-addr, on the master port and the one "
            "after it: a firewall must allow both and, for vLLM's own connections, all other ports."
        ),
    ),
    Topic.PEER_GONE: (
        advice("Check the log of the rank that ended first, on its own node."),
        advice("Then stop and start all ranks together: none rejoins on its own."),
    ),
    Topic.PEER_UNREACHABLE: (
        advice("Check that the other machine runs, and the network between the two."),
        advice("Then start all nodes again: none rejoins on its own."),
    ),
    Topic.RAY_CLUSTER: (
        advice("Check the cluster with 'ray status' from this vLLM's environment; RAY_ADDRESS selects another one."),
        advice("All nodes and this vLLM need the same Ray and the same Python, down to the patch version."),
    ),
    Topic.RAY_GPUS: (
        advice("Check with 'ray status' which GPUs are reserved: end the jobs that hold them, or add a node."),
        advice("Or use fewer workers: tensor × pipeline parallel is the number of free GPUs that Ray needs."),
    ),
    Topic.RAYLET_GONE: (
        advice("Start Ray again on that node (ray start), check it with 'ray status', then restart this server."),
        advice("Check 'dmesg | grep -i kill' there, and raylet.out in /tmp/ray/session_latest/logs, for why it ended."),
    ),
    Topic.DAMAGED_WEIGHTS: (
        advice("Download the model again (hf download MODEL), or run 'git lfs pull' in a folder that git cloned."),
    ),
    Topic.ADAPTER: (
        advice("Check the path in --lora-modules: that folder needs adapter_config.json and the adapter's weights."),
    ),
    Topic.OTHER_WEIGHTS: (
        advice(
            "The folder may hold files of several models: download one again, into an empty folder (hf download MODEL)."
        ),
        advice("If config.json was edited, or --hf-overrides is set: restore the values of the original."),
    ),
    Topic.LISTEN_ADDRESS: (
        Fix(Changes({"host": "127.0.0.1"}), "127.0.0.1 always exists.", "Only this machine can reach the server."),
        advice("For other machines use one of its own addresses ('ip -brief address'), or 0.0.0.0 for all."),
    ),
    Topic.SOCKET_FOLDER: (
        advice("Create the folder in --uds first, with write permission; the whole path may have 107 bytes."),
    ),
    Topic.CERTIFICATE: (
        advice("Check the paths in --ssl-keyfile and --ssl-certfile: the server's user must be able to read both."),
        advice(
            "Both are PEM files, the key without a passphrase; compare 'openssl pkey -pubout -in KEY' with "
            "'openssl x509 -pubkey -noout -in CERTIFICATE'."
        ),
    ),
    Topic.NO_CHAT_TEMPLATE: (
        advice("Pass a template with --chat-template FILE; the model's page often has one."),
        advice("Base models have none: use the instruction-tuned variant for chat."),
        advice("/v1/completions needs no template."),
    ),
    Topic.ARCHITECTURE: (
        advice("Check model_type and architectures in the model's config.json against those on its page."),
        advice("If they are right, use a newer vLLM: the model's page often names the first release that runs it."),
    ),
    Topic.NAMED_FILE: (advice("Check the path: a relative one starts at the folder in which the server is started."),),
    Topic.MIDDLEWARE: (
        advice("Give it as MODULE.NAME, and install the module in vLLM's environment or add it to PYTHONPATH."),
        Fix(Changes(unset=("middleware",)), "Without it the server starts.", "What it did for requests is missing."),
    ),
    Topic.ADAPTER_LIST: (advice("Write --lora-modules NAME=PATH, and the next adapter after a space."),),
    Topic.NO_TOOL_PARSER: (
        advice("Start it with --enable-auto-tool-choice and the --tool-call-parser of the model's family."),
    ),
}
