"""A request as code: curl, and Python and JavaScript with OpenAI's client libraries. Pure.

The API key is read from the environment and never included. Nothing in the code acts as an escape sequence in a
terminal that shows it.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

from vllm_console.chat.conversation import CHAT, ChatRequest
from vllm_launchers.plan.command_line import script_word
from vllm_launchers.secrets import API_KEY


class Language(StrEnum):
    """The target language of the code."""

    CURL = "curl"
    PYTHON = "python"
    JAVASCRIPT = "javascript"


def code_for(url: str, request: ChatRequest, language: Language, *, variable: str) -> str:
    """Code that sends a request to the server at ``url`` and prints the streamed answer.

    The API key comes from the environment ``variable``; empty if the server requires none.
    """
    if language is Language.CURL:
        return _curl(url, request, variable)
    write = {Language.PYTHON: _python, Language.JAVASCRIPT: _javascript}[language]
    return write(f"{url}/v1", request.body, variable or API_KEY, chat=request.path == CHAT)


def _curl(url: str, request: ChatRequest, variable: str) -> str:
    lines = [f"curl -N {script_word(url + request.path)}", "  -H 'Content-Type: application/json'"]
    lines += [f'  -H "Authorization: Bearer ${variable}"'] if variable else []
    lines.append(f"  -d {script_word(_json(request.body | {'stream': True}, 2))}")
    return " \\\n".join(lines)


def _python(base: str, body: dict[str, Any], variable: str, *, chat: bool) -> str:
    create = "chat.completions" if chat else "completions"
    content = "choices[0].delta.content" if chat else "choices[0].text"
    arguments = "".join(f"    {name}={value!r},\n" for name, value in body.items())
    return (
        "import os\n\nfrom openai import OpenAI\n\n"
        f'client = OpenAI(base_url={base!r}, api_key=os.environ.get("{variable}", "none"))\n'
        f"stream = client.{create}.create(\n{arguments}    stream=True,\n)\n"
        "for chunk in stream:\n"
        "    if chunk.choices:\n"
        f'        print(chunk.{content} or "", end="", flush=True)\n'
        "print()"
    )


def _javascript(base: str, body: dict[str, Any], variable: str, *, chat: bool) -> str:
    create = "chat.completions" if chat else "completions"
    content = "choices[0]?.delta?.content" if chat else "choices[0]?.text"
    return (
        'import OpenAI from "openai";\n\n'
        f'const client = new OpenAI({{ baseURL: {_json(base)}, apiKey: process.env.{variable} ?? "none" }});\n'
        f"const stream = await client.{create}.create({_json(body | {'stream': True}, 2)});\n"
        "for await (const chunk of stream) {\n"
        f'  process.stdout.write(chunk.{content} ?? "");\n'
        "}\n"
        "console.log();"
    )


def _json(value: Any, indent: int | None = None) -> str:
    """JSON, with unprintable characters escaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return text if indent is None and text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    return json.dumps(character)[1:-1]
