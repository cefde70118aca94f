"""A rolling update: run a server's new generation next to the old one, and compare their answers."""

from __future__ import annotations

import msgspec

from vllm_launchers.errors import OperationError
from vllm_launchers.keeper import golden
from vllm_launchers.keeper.health import requests
from vllm_launchers.keeper.records import ServerRecord, State
from vllm_launchers.keeper.server_client import ServerClient, base_model, client_of

ANSWER_SECONDS = 120.0
"""Timeout for one answer of 16 tokens; long because the old server is in use."""


class AnswerComparison(msgspec.Struct, frozen=True):
    """Greedy answers of two servers to the golden prompts: how many were compared, and the prompts that differ.

    Prompts that one server answers differently when asked twice are not compared.
    """

    compared: int
    different: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The result as a sentence."""
        if not self.compared:
            return "answers were not compared: the servers do not complete the golden prompts"
        if not self.different:
            return f"same answers to all {self.compared} golden prompts"
        return (
            f"different answers to {len(self.different)} of {self.compared} golden prompts; flags such as the data "
            "type can change answers"
        )


def compare_answers(old: ServerRecord, new: ServerRecord) -> AnswerComparison:
    """Compare the answers of both servers. Takes seconds; under load the old one may take longer.

    Raises:
        OperationError: one of them is not ready, or does not answer.
    """
    clients = [_client(record) for record in (old, new)]
    try:
        for record, client in zip((old, new), clients, strict=True):
            if record.current.spec.warm_up is None:
                _warm_up(client)
        before = golden.record(clients[0], ANSWER_SECONDS)
        after = golden.answers(clients[1], ANSWER_SECONDS, [one.prompt for one in before]) if before else ()
    except OSError as error:
        raise OperationError(f"the answers of {old.name} and {new.name} could not be compared: {error}") from error
    return AnswerComparison(len(before), golden.differing(before, after))


def _warm_up(client: ServerClient) -> None:
    """Send a longer text first: a golden prompt as the very first request crashes vLLM on some CPUs."""
    model = base_model(client.ask("GET", "/v1/models").document)
    if model is not None:
        path, body = requests(model)[0]
        client.ask("POST", path, body, seconds=ANSWER_SECONDS)


def _client(record: ServerRecord) -> ServerClient:
    if record.server is None or record.state is not State.READY:
        raise OperationError(f"{record.name} is {record.state}: only the answers of ready servers can be compared")
    return client_of(record, record.server)
