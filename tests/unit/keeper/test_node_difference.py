"""How the fingerprints of two nodes differ, in words."""

from __future__ import annotations

from vllm_launchers.keeper.node_link import fingerprint_difference

OURS = {"vLLM": "0.32.0", "model configuration": "sha256:aa", "--max-num-seqs": "4", "--enforce-eager": "true"}


def test_equal_ones_do_not_differ() -> None:
    assert fingerprint_difference(OURS, dict(reversed(OURS.items())), 0, 1) == ""


def test_versions_hashes_and_flags_are_named() -> None:
    theirs = {**OURS, "vLLM": "0.31.0", "model configuration": "sha256:bb"}
    assert fingerprint_difference(OURS, theirs, 0, 1) == (
        "node 1 has vLLM 0.31.0, node 0 has vLLM 0.32.0; node 1 has another model configuration than node 0"
    )
    fewer = {name: value for name, value in OURS.items() if name != "--max-num-seqs"}
    assert fingerprint_difference(OURS, fewer, 0, 3) == "node 3 has no --max-num-seqs, node 0 has --max-num-seqs 4"


def test_what_is_unknown_on_a_side_is_not_compared() -> None:
    assert fingerprint_difference(OURS, {**OURS, "model configuration": ""}, 0, 1) == ""


def test_what_another_machine_says_is_short_and_has_no_control_characters() -> None:
    many = {f"--flag-{number}\x1b[2J": "x" * 100 for number in range(50)}
    text = fingerprint_difference(OURS, {**OURS, **many}, 0, 1)
    assert text.isprintable()
    assert len(text) <= 300
