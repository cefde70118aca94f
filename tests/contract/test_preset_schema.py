"""The JSON Schema for editors is current, accepts the shipped presets and rejects what the loader rejects."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from vllm_launchers.presets.load import Problem, check_document, shipped_folder
from vllm_launchers.presets.schema import text

FILES = sorted(shipped_folder().glob("*.toml"))
BASE = 'extends = "chatbot"\n'


@pytest.fixture(scope="module")
def validator() -> Any:
    document = json.loads((shipped_folder() / "schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(document)
    return jsonschema.Draft202012Validator(document)


def test_schema_file_is_current() -> None:
    assert (shipped_folder() / "schema.json").read_text(encoding="utf-8") == text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_presets_are_valid(validator: Any, path: Path) -> None:
    content = path.read_text(encoding="utf-8")
    assert content.startswith("#:schema ./schema.json\n")
    validator.validate(tomllib.loads(content))


@pytest.mark.parametrize(
    "text",
    [
        BASE,
        BASE + 'drop = ["max-num-seqs"]\n',
        BASE + "[flags]\nmax-num-seqs = 4\n",
        BASE + '[flags.max-model-len]\nvalue = "16k"\nwhy = "x"\n',
        BASE + '[flags]\n"compilation-config.mode" = 3\nsome-new-flag = "x"\n',
        BASE + "[workload]\nconcurrency = 4\n",
        BASE + '[environment]\nHF_TOKEN_PATH = "/x"\nTOKENIZERS_PARALLELISM = "false"\n',
    ],
)
def test_schema_and_reader_accept_it(validator: Any, text: str) -> None:
    document = tomllib.loads(text)
    validator.validate(document)
    check_document(document, complete="extends" not in document)


@pytest.mark.parametrize(
    "text",
    [
        'title = "x"',
        'title = ""',
        "extends = 3",
        'modle = "x"',
        'drop = ["x"]',
        BASE + 'title = "a\\nb"',
        BASE + "[flags]\nmax-num-seqs = 0",
        BASE + "[flags]\nmax-num-seqs = 2.5",
        BASE + '[flags]\nmax-model-len = "long"',
        BASE + "[flags]\ngpu-memory-utilization = 1.5",
        BASE + "[flags]\ngpu-memory-utilization = 0",
        BASE + '[flags]\nenable-prefix-caching = "yes"',
        BASE + "[flags]\nmax_num_seqs = 4",
        BASE + "[flags]\nport = 4",
        BASE + '[flags]\napi-key = "x"',
        BASE + "[flags]\nno-enable-prefix-caching = true",
        BASE + "[flags.max-num-seqs]\nvalue = 4",
        BASE + '[flags.max-num-seqs]\nvalue = 4\nwhy = "x"\nnote = "x"',
        BASE + '[environment]\nHF_TOKEN = "x"',
        BASE + "[environment]\nA = 1",
        BASE + "[workload]\nconcurrency = 0",
        BASE + "[workload]\nspeed = 1",
        BASE + "[objectives]\nkv_cache_usage = 85",
    ],
)
def test_schema_and_reader_refuse_it(validator: Any, text: str) -> None:
    document = tomllib.loads(text)
    assert not validator.is_valid(document)
    with pytest.raises(Problem):
        check_document(document, complete="extends" not in document)
