"""The program's entry point."""

from __future__ import annotations

import sys

from vllm_console import __main__ as program


class _Interrupted:
    """Import of the command line while the user presses ctrl+c."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "vllm_console.cli.main":
            raise KeyboardInterrupt


def test_interrupt_during_the_import_ends_the_program_quietly(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "vllm_console.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_Interrupted(), *sys.meta_path])
    assert program.run() == 130
    assert capsys.readouterr() == ("", "")
