"""Adapters that have requests, from labels as written by vLLM 0.32."""

from __future__ import annotations

from vllm_console.fleet.adapters import adapters_with_requests

HEAD = "# TYPE vllm:lora_requests_info gauge\n"


def line(names: str, value: str) -> str:
    labels = f'max_lora="1",running_lora_adapters="{names}",waiting_lora_adapters="{names}"'
    return f"vllm:lora_requests_info{{{labels}}} {value}\n"


def test_newest_series_counts_wherever_it_is() -> None:
    both, none = line("a,b", "1.7954552029047883e+09"), line("", "1.7954552029471946e+09")
    assert adapters_with_requests(HEAD + both + none) == frozenset()
    assert adapters_with_requests(HEAD + none + both.replace("2029047883", "2039047883")) == {"a", "b"}


def test_adapter_names_and_values_of_any_kind() -> None:
    assert adapters_with_requests(HEAD) is None
    assert adapters_with_requests(line("a", "1e+e") + line("b", "NaN")) is None
    assert adapters_with_requests(line('say \\"hi\\"', "5.0")) == {'say "hi"'}
