"""Which weight files vLLM would load, their sizes, and whether they are complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_launchers.vllm.modelfacts.weights import WeightFiles, parse_index, weights_in

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5000\n"


@pytest.mark.parametrize(
    ("files", "total"),
    [
        ({"model.safetensors": 100, "pytorch_model.bin": 70}, 100),
        ({"a.safetensors": 100, "b.safetensors": 20}, 120),
        ({"consolidated.safetensors": 90, "model-00001-of-00002.safetensors": 50}, 90),
        ({"consolidated-00001.safetensors": 90, "consolidated-00002.safetensors": 5, "x.safetensors": 1}, 95),
        ({"model.safetensors": 100, "adapter_model.safetensors": 7}, 100),
        ({"pytorch_model-1.bin": 70, "pytorch_model-2.bin": 30, "training_args.bin": 5, "optimizer.bin": 900}, 100),
        ({"model.pt": 40, "optimizer.pt": 80, "scheduler.pt": 1}, 40),
        ({"consolidated.00.pth": 60}, 60),
        ({"some.gguf": 33}, 33),
    ],
)
def test_counted_weight_files(make: Any, files: dict[str, int], total: int) -> None:
    folder = make.folder("m", {name: b"x" * size for name, size in files.items()})
    make.folder("m/original", {"consolidated.00.pth": b"x" * 500})
    weights = weights_in(folder)
    assert (weights.total, weights.present, weights.missing) == (total, total, ())


def test_no_weights(make: Any) -> None:
    assert weights_in(make.folder("m", {"config.json": {}})) == WeightFiles()


def test_index_chooses_the_files(make: Any) -> None:
    files = {f"model-0000{one}-of-00002.safetensors": b"x" * 100 for one in (1, 2)}
    index = make.index(2, 77)
    folder = make.folder("m", {**files, "other.safetensors": b"x" * 999, "model.safetensors.index.json": index})
    assert weights_in(folder).total == 200


def test_files_missing_from_the_index(make: Any) -> None:
    files = {"model-00001-of-00003.safetensors": b"x" * 1500, "model-00002-of-00003.safetensors": POINTER}
    weights = weights_in(make.folder("m", {**files, "model.safetensors.index.json": make.index(3, 9000)}))
    assert weights.missing == ("model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors")
    assert (weights.total, weights.present) == (9000, 1500)


def test_pointers_report_their_size(make: Any) -> None:
    weights = weights_in(make.folder("m", {"model.safetensors": POINTER}))
    assert weights == WeightFiles(5000, 0, ("model.safetensors",))


def test_names_state_the_number_of_files(make: Any) -> None:
    weights = weights_in(make.folder("m", {f"model-0000{one}-of-00004.safetensors": b"x" for one in (1, 3)}))
    assert weights.missing == ("model-00002-of-00004.safetensors", "model-00004-of-00004.safetensors")
    assert weights.total is None


def test_index_may_not_point_outside(make: Any) -> None:
    index = {"weight_map": {"a": "../../etc/passwd", "b": "model.safetensors", "c": 7}}
    weights = weights_in(make.folder("m", {"model.safetensors": b"x" * 10, "model.safetensors.index.json": index}))
    assert (weights.total, weights.missing) == (10, ())


def test_header_of_a_file(make: Any) -> None:
    plain = make.safetensors({"a": ("BF16", 200), "b": ("BF16", 100)})
    weights = weights_in(make.folder("plain", {"model.safetensors": plain}))
    assert (weights.parameters, weights.dtype, weights.missing) == (150, "bfloat16", ())
    mixed = weights_in(
        make.folder("mixed", {"model.safetensors": make.safetensors({"a": ("F32", 8), "b": ("F16", 8)})})
    )
    assert (mixed.parameters, mixed.dtype) == (6, None)
    packed = weights_in(make.folder("packed", {"model.safetensors": make.safetensors({"a": ("I32", 8)})}))
    assert (packed.parameters, packed.dtype) == (None, None)


def test_file_shorter_than_its_header_is_missing(make: Any) -> None:
    whole = make.safetensors({"a": ("BF16", 4000)})
    weights = weights_in(make.folder("m", {"model.safetensors": whole[:-1000]}))
    assert weights == WeightFiles(len(whole), len(whole) - 1000, ("model.safetensors",))


LONG_NUMBERS = [
    b'{"a":{"dtype":"BF16","data_offsets":[%s,%s]}}' % (start, end)
    for start, end in ((b"0", b"9" * 400), (b"-" + b"9" * 400, b"8"), (b"0", b"9" * 5000))
]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        b"\xff" * 8 + b"x" * 50,
        (2).to_bytes(8, "little") + b"[]",
        (90).to_bytes(8, "little") + b'{"a":',
        (44).to_bytes(8, "little") + b'{"a":{"dtype":["BF16"],"data_offsets":[8,0]}}',
        *(len(header).to_bytes(8, "little") + header for header in LONG_NUMBERS),
        (60000).to_bytes(8, "little") + b"[" * 60000,
    ],
)
def test_any_header_is_handled(make: Any, content: bytes) -> None:
    weights = weights_in(make.folder("m", {"model.safetensors": content}))
    assert (weights.total, weights.parameters) == (len(content), None)


def test_long_index_is_searched_for_the_same_facts(make: Any) -> None:
    index = make.index(3, 9000)
    short = parse_index(json.dumps(index).encode(), "here")
    index["weight_map"].update(
        {
            f"model.layers.{one}.mlp.experts.weight_scale_inv": "model-00002-of-00003.safetensors"
            for one in range(20_000)
        }
    )
    data = json.dumps(index, indent=2).encode()
    assert len(data) > 2**20
    assert parse_index(data, "here") == short
    assert short.total == 9000
    assert len(short.files) == 3


def test_long_index_with_all_files_is_read_from_its_beginning(make: Any) -> None:
    index = make.index(2, 9000)
    index["weight_map"].update({f"layer.{one}": "model-00002-of-00002.safetensors" for one in range(3, 9000)})
    files = {f"model-0000{one}-of-00002.safetensors": b"x" * 100 for one in (1, 2)}
    folder = make.folder("m", {**files, "model.safetensors.index.json": index})
    assert weights_in(folder).total == 200
    (folder / "model-00002-of-00002.safetensors").unlink()
    cut = weights_in(folder)
    assert (cut.missing, cut.total, cut.present) == (("model-00002-of-00002.safetensors",), 9000, 100)


def test_folder_with_too_many_files(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_launchers.vllm.modelfacts.weights.MOST_FILES", 3)
    folder = make.folder("m", {f"{one}.safetensors": b"x" for one in range(9)})
    assert weights_in(folder).present == 3
