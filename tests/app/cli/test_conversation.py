"""``ask`` without a question: a conversation in a terminal, one question per line from a pipe."""

from __future__ import annotations

import json
import os
import pty
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.app.cli.app import app
from blockattn_rag.app.cli.ask import talk
from blockattn_rag.app.rag.ask import AssistantAnswer, Source, Turn
from blockattn_rag.engine.results import ReuseStats
from blockattn_rag.errors import ContextOverflowError
from tests.app.cli.conftest import Command
from tests.holding import LONGEST_S
from tests.processes import PROCESSES

QUESTION = "How high is Halden Tower?"
SOURCE = Source("notes.pdf", "7", "", "The tower is\n214 metres high. " + "More of it. " * 20, 0.5)


class Answering:
    """Assistant that returns prepared answers, and records its questions."""

    def __init__(self, *answers: str | BaseException) -> None:
        self._answers = iter(answers)
        self.asked: list[tuple[str, list[Turn]]] = []

    def ask(
        self, question: str, *, mode: Any, on_text: Callable[[str], None], history: Sequence[Turn]
    ) -> AssistantAnswer:
        self.asked.append((question, [*history]))
        answer = next(self._answers)
        on_text("begun ")
        if isinstance(answer, BaseException):
            raise answer
        on_text(answer)
        stats = ReuseStats(mode, 2, 0, 90, 10, generated_tokens=3)
        return AssistantAnswer(question, answer, (SOURCE,), stats, "stop", 0.25)


Converse = Callable[..., tuple[str, str]]


@pytest.fixture
def converse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Converse:
    """Function that types lines until the input ends. Returns stdout and stderr."""

    def run(answering: Any, *lines: str | BaseException | type[BaseException]) -> tuple[str, str]:
        coming = iter([*lines, EOFError])

        def read(prompt: str) -> str:
            if isinstance(line := next(coming), str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)
        talk(answering, mode="block")
        out, err = capsys.readouterr()
        return " ".join(out.split()), " ".join(err.split())

    return run


def test_a_conversation_keeps_its_history(converse: Converse) -> None:
    answering = Answering("214 metres.", "Yes.", "No.")
    out, err = converse(answering, "How high?", "", "  Is that high? ", "/clear", "And?")
    assert answering.asked == [
        ("How high?", []),
        ("Is that high?", [Turn("How high?", "214 metres.")]),
        ("And?", []),
    ]
    assert "214 metres. [1] notes.pdf page 7 (0.50): The tower is 214 metres high." in out
    assert "2 blocks reused, 0 computed; 90 of 100 prompt tokens reused; first token after" in out
    assert "Conversation cleared" in err


def test_stop_adds_no_turn(converse: Converse) -> None:
    answering = Answering(KeyboardInterrupt(), "Yes.")
    out, err = converse(answering, "How high?", KeyboardInterrupt, "Is that high?")
    assert answering.asked[1] == ("Is that high?", [])
    assert "begun ... [stopped]" in out
    assert "Ctrl-D exits" in err


def test_a_conversation_continues_after_invalid_bytes(converse: Converse) -> None:
    invalid = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    out, err = converse(Answering("Yes."), invalid, "How high?")
    assert "not valid utf-8 (the terminal's encoding); type it again" in err
    assert "begun Yes." in out


def test_a_conversation_continues_after_an_error(converse: Converse) -> None:
    answering = Answering(ContextOverflowError("too long\nby far"), "Yes.")
    out, err = converse(answering, "How high?", "Is that high?")
    assert "error: too long by far" in err
    assert "begun Yes." in out
    assert answering.asked[1] == ("Is that high?", [])


def test_commands_are_executed(converse: Converse) -> None:
    answering = Answering("Yes.")
    lines = ("/sources", "/help", "/nothing", "How?", "/sources", "/quit", "never asked")
    out, err = converse(answering, *lines)
    assert out.startswith("No answer yet Type a question")
    assert "Unknown command /nothing" in err
    assert out.count("More of it.") == 20 + 6  # in full, and shortened next to the answer
    assert len(answering.asked) == 1


def test_each_line_of_a_pipe_is_a_separate_question(cli: Command, filled: Path) -> None:
    command = ("ask", "--db", filled, "--max-new-tokens", 2)
    given = f"{QUESTION}\n\n  How old?\n"
    found = [json.loads(line) for line in cli(*command, "--json", given=given).stdout.splitlines()]
    assert [one["question"] for one in found] == [QUESTION, "How old?"]
    alone = cli("ask", "How old?", *command[1:], "--json").json
    assert found[1]["answer"] == alone["answer"]
    assert 0 < found[0]["ttft_s"] <= found[0]["waited_s"]
    shown = cli(*command, given=given).stdout
    assert shown.count("[1] ") == 2
    assert cli(*command, given="\n").stdout == ""


def ask_in_terminal(name: str, database: Path) -> None:
    """Run ``ask`` in the terminal with this device name."""
    for descriptor in range(3):
        os.dup2(os.open(name, os.O_RDWR), descriptor)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    app(["ask", "--db", str(database), "--max-new-tokens", "2"])


@pytest.fixture
def terminal(filled: Path) -> Iterator[tuple[int, BaseProcess]]:
    """The controlling end of a pseudoterminal, and the ``ask`` process that runs in it."""
    ours, its = pty.openpty()
    process = PROCESSES.Process(target=ask_in_terminal, args=(os.ttyname(its), filled))
    process.start()
    yield ours, process
    process.kill()
    process.join()
    os.close(its)
    os.close(ours)


def test_terminal_stays_open(terminal: tuple[int, BaseProcess]) -> None:
    ours, process = terminal
    seen = b""

    def wait_for(text: bytes) -> None:
        nonlocal seen
        while text not in seen:
            seen += os.read(ours, 1 << 16)
        seen = seen.partition(text)[2]

    wait_for(b"Ctrl-D exits")
    for question in (b"How high is it?", b"And how old?"):
        wait_for(b"> ")
        os.write(ours, question + b"\n")
        wait_for(b"first token after")
    wait_for(b"> ")
    os.write(ours, b"\x04")
    process.join(LONGEST_S)
    assert process.exitcode == 0
