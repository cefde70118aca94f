"""Bodies of ``/metrics`` are read like prometheus_client reads them, for all of vLLM's versions; hostile ones are
harmless."""

from __future__ import annotations

import contextlib
import math
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from vllm_console.metrics.parse import (
    COUNTER_FAMILIES,
    GAUGE_FAMILIES,
    HISTOGRAM_FAMILIES,
    CacheConfig,
    NotMetricsError,
    Parser,
    cache_config,
    parse_metrics,
)
from vllm_console.metrics.sample import Sample

INF = math.inf


def by_prometheus(text: str) -> dict[str, dict[str, object]]:
    """The preferred family's values per engine, read independently with prometheus_client's own parser."""
    series: dict[tuple[str, str], list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for found in family.samples:
            engine = found.labels.get("engine", "0")
            series.setdefault((engine, found.name), []).append((found.labels, found.value))
    engines: dict[str, dict[str, object]] = {}
    for engine in {engine for engine, name in series if name.startswith("vllm:num_requests_running")}:
        read: dict[str, object] = {}
        for key, names in {**GAUGE_FAMILIES, **COUNTER_FAMILIES}.items():
            for name in names:
                if (engine, name) in series:
                    read[key] = sum(value for _, value in series[engine, name])
                    break
        for key, names in HISTOGRAM_FAMILIES.items():
            for name in names:
                if (engine, f"{name}_bucket") in series:
                    pairs = sorted((float(labels["le"]), value) for labels, value in series[engine, f"{name}_bucket"])
                    read[key] = (tuple(pairs), series[engine, f"{name}_sum"][0][1])
                    break
        engines[engine] = read
    return engines


def as_read(sample: Sample) -> dict[str, dict[str, object]]:
    engines: dict[str, dict[str, object]] = {}
    for label, engine in sample.engines.items():
        read: dict[str, object] = {}
        for key in (*GAUGE_FAMILIES, *COUNTER_FAMILIES):
            if getattr(engine, key) is not None:
                read[key] = getattr(engine, key)
        for key, histogram in engine.histograms.items():
            read[key] = (tuple(zip(histogram.bounds, histogram.counts, strict=True)), histogram.sum)
        engines[label] = read
    return engines


@pytest.mark.parametrize("version", ["0.8.5", "0.10.2", "0.33.0"])
@pytest.mark.parametrize("count", [1, 2, 12])
def test_same_values_as_prometheus_client(body, version, count):
    engines = [
        {"running": float(n), "usage": n / 16, "preemptions": 10.0 * n, "ttft": [0.01] * n} for n in range(count)
    ]
    text = body(version, engines)
    parser = Parser()
    for _ in range(3):  # from the second time on, lines are cached
        assert as_read(parser.parse(text, 5.0)) == by_prometheus(text)


def test_steady_parse_sees_changed_values(body):
    parser = Parser()
    parser.parse(body(engines=[{"running": 1.0, "ttft": [0.3]}]), 1.0)
    text = body(engines=[{"running": 9.0, "ttft": [0.3, 0.3, 4.0]}])
    assert as_read(parser.parse(text, 2.0)) == by_prometheus(text)


def test_unchanged_histograms_are_shared_between_samples(body):
    parser = Parser()
    first, second = parser.parse(body(), 1.0), parser.parse(body(), 2.0)
    assert first.engines["0"].histograms["ttft"] is second.engines["0"].histograms["ttft"]


def test_old_names_are_fallbacks_for_new_ones(body):
    old = parse_metrics(body("0.8.5", [{"usage": 0.25, "itl": [0.03]}]), 1.0).engines["0"]
    assert (old.kv_cache_usage, old.prefix_cache_queries_total, old.histograms["itl"].count) == (0.25, 1000.0, 1.0)
    both = body("0.10.2", [{"usage": 0.25}]).replace(
        'vllm:gpu_cache_usage_perc{engine="0",model_name="tiny"} 0.25',
        'vllm:gpu_cache_usage_perc{engine="0",model_name="tiny"} 0.99',
    )
    assert "0.99" in both
    assert parse_metrics(both, 1.0).engines["0"].kv_cache_usage == 0.25


def test_v0_names_without_engine_label():
    text = (
        'vllm:num_requests_running{model_name="m"} 4.0\nvllm:gpu_cache_usage_perc{model_name="m"} 0.75\n'
        'vllm:time_in_queue_requests_bucket{le="0.3",model_name="m"} 1.0\n'
        'vllm:time_in_queue_requests_bucket{le="+Inf",model_name="m"} 2.0\n'
        'vllm:time_in_queue_requests_sum{model_name="m"} 3.0\n'
    )
    engine = parse_metrics(text, 1.0).engines["0"]
    assert (engine.requests_running, engine.kv_cache_usage) == (4.0, 0.75)
    assert engine.histograms["queue"].counts == (1.0, 2.0)


def test_request_success_is_summed_over_reasons(body):
    engine = parse_metrics(body(engines=[{"finished": 12.0}]), 1.0).engines["0"]
    assert engine.requests_finished_total == 12.0
    assert engine.generation_tokens_total == 3400.0
    assert "iteration_tokens_total" not in engine.histograms


def test_unreported_is_none_not_zero():
    engine = parse_metrics('vllm:num_requests_running{engine="0",model_name="m"} 0.0\n', 1.0).engines["0"]
    assert engine.requests_running == 0.0
    assert engine.kv_cache_usage is None
    assert engine.preemptions_total is None
    assert engine.histograms == {}


def test_server_without_vllm_families_has_no_engines():
    sample = parse_metrics("process_open_fds 41.0\n", 1.0)
    assert (dict(sample.engines), sample.kv_cache_tokens, sample.model_name) == ({}, None, None)


@pytest.mark.parametrize(
    ("config", "engines", "tokens"),
    [
        ({}, 1, 1600),
        ({}, 4, 1600),  # num_gpu_blocks is already the sum over engines
        ({"kv_cache_size_tokens": "1111"}, 1, 1111),
        ({"kv_cache_size_tokens": "1111"}, 3, 3333),  # this one is reported per engine
        ({"kv_cache_size_tokens": "None"}, 1, 1600),
        ({"num_gpu_blocks": "None"}, 1, None),
        ({"num_gpu_blocks": "99999999999999999999999"}, 1, None),
    ],
)
def test_kv_cache_tokens(body, config, engines, tokens):
    assert parse_metrics(body(engines=[{}] * engines, config=config), 1.0).kv_cache_tokens == tokens


def test_labels_may_contain_anything(body):
    model = 'we"ird\\{mo,del} # 1 2\nname'
    text = body(model=model)
    parser = Parser()
    parser.parse(text, 1.0)
    sample = parser.parse(text, 1.0)
    assert sample.model_name == model
    assert as_read(sample) == by_prometheus(text)


def test_several_served_names_are_not_counted_twice(body):
    first, second = body(model="a", engines=[{"running": 3.0}]), body(model="b", engines=[{"running": 3.0}])
    sample = parse_metrics(first + second, 1.0)
    assert sample.model_name == "a"
    assert {label: engine.requests_running for label, engine in sample.engines.items()} == {"0": 3.0}


def test_timestamps_exemplars_crlf_and_odd_spaces():
    lines = [
        'vllm:num_requests_running{engine="0",model_name="m"} 3 1700000000000',
        'vllm:num_preemptions_total{engine="0",model_name="m"} 5 # {trace_id="a b} 9"} 1.0 1700000000.0',
        'vllm:kv_cache_usage_perc {engine="0", model_name="m",}\t0.5',
        'vllm:num_requests_waiting{engine="0",model_name="m"} +Inf',
        'vllm:prompt_tokens_total{engine="0",model_name="m"} NaN',
        "vllm:generation_tokens_total 12",
        "# EOF",
    ]
    parser = Parser()
    for _ in range(2):
        for end in ("\n", "\r\n"):
            engine = parser.parse(end.join(lines) + end, 1.0).engines["0"]
            assert (engine.requests_running, engine.preemptions_total, engine.kv_cache_usage) == (3.0, 5.0, 0.5)
            assert engine.requests_waiting is None
            assert engine.prompt_tokens_total is None


def test_removed_engine_disappears(body):
    parser = Parser()
    assert set(parser.parse(body(engines=[{}, {}]), 1.0).engines) == {"0", "1"}
    assert set(parser.parse(body(engines=[{}]), 2.0).engines) == {"0"}
    assert set(parser.parse(body(engines=[{}], model="other"), 3.0).engines) == {"0"}


def test_changed_bounds_are_adopted(body):
    parser = Parser()
    parser.parse(body(), 1.0)
    text = "".join(line + "\n" for line in body().splitlines() if 'le="0.25"' not in line)
    text += 'vllm:time_to_first_token_seconds_bucket{engine="0",model_name="tiny",le="77.0"} 3.0\n'
    assert as_read(parser.parse(text, 2.0)) == by_prometheus(text)


def test_missing_infinite_bucket_is_derived_from_the_count():
    text = 'vllm:e2e_request_latency_seconds_bucket{le="1.0"} 2\nvllm:e2e_request_latency_seconds_count 5\n'
    histogram = parse_metrics(text, 1.0).engines["0"].histograms["e2e"]
    assert (histogram.bounds, histogram.counts) == ((1.0, INF), (2.0, 5.0))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "empty"),
        (" \n\n", "empty"),
        ("<!DOCTYPE html>\n<html></html>\n", "html"),
        ("\ufeff  <html>\n", "html"),
        ("vllm:num_requests_running 1", "cut off"),
        ("lorem ipsum dolor\nsit amet\n", "garbage"),
        ("\x00\x01\x02\n", "garbage"),
        ('{"detail": "Not Found"}\n', "garbage"),
    ],
)
def test_non_metrics_are_refused_in_one_sentence(text, kind):
    with pytest.raises(NotMetricsError) as caught:
        parse_metrics(text, 1.0)
    assert caught.value.kind == kind
    assert "\n" not in str(caught.value)


def test_ever_changing_series_use_bounded_memory(body):
    parser = Parser(max_series=2000)
    for turn in range(30):
        hostile = "".join(
            f'vllm:num_requests_running{{engine="e{turn}x{n}",model_name="tiny"}} 1.0\nx_{turn}_{n} 1\n'
            for n in range(200)
        )
        parser.parse(hostile, float(turn))
    assert len(parser._slots) <= 2001 + 1
    assert parser._used <= 2001
    for _ in range(12):
        text = body(engines=[{"running": 6.0}])
        sample = parser.parse(text, 99.0)
    assert as_read(sample) == by_prometheus(text)


def test_implausibly_many_engines_are_dropped(body):
    parser = Parser()
    crowd = "".join(f'vllm:num_requests_running{{engine="{n}",model_name="tiny"}} 1.0\n' for n in range(5000))
    assert len(parser.parse(crowd, 1.0).engines) == 1024
    text = body(engines=[{"running": 6.0}])
    assert as_read(parser.parse(text, 2.0)) == by_prometheus(text)


def test_long_body_with_foreign_families_is_read_completely(body):
    """It is read in pieces, and pieces without a vLLM metric are skipped."""
    others = "".join(f'node_cpu_seconds_total{{cpu="{n}",mode="idle"}} {n}.5\n' for n in range(5000))
    text = body(engines=[{"running": 6.0}])
    for mixed in (others + text, text + others, others + "\n" + text + "# EOF"):
        assert as_read(parse_metrics(mixed, 1.0)) == by_prometheus(text)


_label_text = st.text(alphabet=st.sampled_from(string.ascii_letters + '"\\{}, =#\n\t0é'), max_size=12)
_value = st.floats(min_value=0, max_value=1e12, allow_nan=False).map(lambda value: round(value, 3))


@given(
    model=_label_text,
    rows=st.lists(st.tuples(_value, _value, _value), min_size=1, max_size=4),
    version=st.sampled_from(["0.8.5", "0.10.2", "0.33.0"]),
)
def test_any_body_is_read_like_prometheus_client(model, rows, version):
    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    usage = GAUGE_FAMILIES["kv_cache_usage"][version == "0.8.5"]
    lines = []
    for number, (running, usage_value, count) in enumerate(rows):
        labels = f'engine="{number}",model_name="{escaped(model)}"'
        lines += [
            f"vllm:num_requests_running{{{labels}}} {running!r}",
            f"{usage}{{{labels}}} {usage_value!r}",
            f'vllm:time_to_first_token_seconds_bucket{{{labels},le="0.5"}} {count / 2!r}',
            f'vllm:time_to_first_token_seconds_bucket{{{labels},le="+Inf"}} {count!r}',
            f"vllm:time_to_first_token_seconds_sum{{{labels}}} {running!r}",
        ]
    text = "\n".join(lines) + "\n"
    parser = Parser()
    parser.parse(text, 0.0)
    assert as_read(parser.parse(text, 1.0)) == by_prometheus(text)


@given(st.text(max_size=300))
def test_any_text_is_parsed_without_a_crash(text):
    with contextlib.suppress(NotMetricsError):
        assert parse_metrics(text + "\n", 1.0).at == 1.0


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        (['enable_prefix_caching="True",block_size="32",prefix_match_unit="None"'], (True, 32)),
        (['enable_prefix_caching="True",block_size="1152",prefix_match_unit="64"'], (True, 64)),
        (['enable_prefix_caching="False",block_size="16"'], (False, 16)),
        (
            ['enable_prefix_caching="True",block_size="16"', 'enable_prefix_caching="False",block_size="32"'],
            (None, None),
        ),
        (['num_gpu_blocks="10"'], (None, None)),
        ([], (None, None)),
    ],
)
def test_prefix_caching_and_its_step_are_read(labels, found):
    """As reported by vLLM 0.32.0, with and without a unit; two engines that differ give no result."""
    lines = [f'vllm:cache_config_info{{engine="{at}",{one}}} 1.0' for at, one in enumerate(labels)]
    text = "\n".join([*lines, 'vllm:num_requests_running{engine="0",model_name="m"} 1.0', ""])
    sample = parse_metrics(text, 0.0)
    assert (sample.prefix_caching, sample.prefix_step) == found


def test_cache_is_that_of_one_engine():
    """``num_gpu_blocks`` is the total of all engines, repeated on each engine's line."""
    line = (
        'vllm:cache_config_info{{block_size="16",enable_prefix_caching="True",engine="{}",num_gpu_blocks="1000"}} 1.0'
    )
    assert cache_config(line.format(0)) == CacheConfig(1000, 16, True, 1)
    assert cache_config("\n".join(map(line.format, range(4)))) == CacheConfig(250, 16, True, 4)
    assert cache_config("vllm:num_requests_running 1.0") is None
