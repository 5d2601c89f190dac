"""Repeated prose counts as a loop, and repeated data and code do not, with a real tokenizer."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from blockattn_rag.model.constraint import AnswerRules
from blockattn_rag.model.loading import resolve_name
from blockattn_rag.output.grammar import parse_grammar

LETTER = (
    "Dear customer,\n\nyour order was sent today. It should arrive within five working days. Write "
    "to us if it does not, and we will look for it at once.\n\nKind regards,\nYour shop\n\n"
)
ROWS = (
    # Numbers and constants.
    *("0x00, ", "0.0f, ", "1e5, ", "1.0f, 0.0f, 0.0f, 0.0f,\n", "NaN,NaN,NaN\n", "null, "),
    *("None, ", "true,\n", "ff ", "AT", "CAG", "nop\n", "nop ", "true false "),
    *("CAG TTG ", "face, ", "NaN ", "A ", "'berlin', ", "[berlin] ", "x=berlin ", "(berlin) "),
    # Cells, lists and markup.
    *("x & ", "x & y & z \\\\\n", "<td></td>", "<p>It is a text.</p>\n", "- yes\n"),
    *("- [ ] todo\n", "| n/a | n/a |\n", "| yes | no |\n", "| No data. | No more. |\n"),
    *("('a', NULL, NULL),\n", "yes,no,New York\n", "a: some text\n", "yes, no, maybe, "),
    *("| 是 | 否 |\n", "是,否\n", "是，否，"),
    # Code.
    *("    return None\n", "x = 1\n", "if x is not None:\n    return x\n", "import os\n"),
    *('print("Hello, dear world!")\n', '    log.info("It was received.")\n', "end if\n"),
    *(
        "foo() ",
        "<pad> ",
        "berlin | ",
        "\\berlin ",
        "mov eax, ebx\n",
        "INSERT INTO t VALUES (NULL, NULL);\n",
        'echo "He is here!"\n',
    ),
)
DATA = {**dict.fromkeys(ROWS, 300), "A": 1_200, "0123456789abcdeffedcba9876543210": 40}
PROSE = (
    *("He sat. ", "I am a robot. ", "The capital of France is Paris.\n", "and the river "),
    *("- The capital of France is Paris.\n", "Question: Where is it?\nAnswer: It is in Paris.\n\n"),
    *("a tower, a lake, a river, ", "**Answer:** The capital is Paris.\n\n", "He sat [1]. "),
    *(
        "The price of the watch 300 is 89.99 euros in 2025. ",
        '"I see," he said. ',
        "我今天去学校。",
    ),
    *("Я иду в школу сегодня. ", "मैं आज स्कूल जाता हूँ। ", "วันนี้ฉันไปโรงเรียน ", LETTER),
)
REFRAIN = "Row, row, row your boat,\ngently down the stream.\n"
LEGITIMATE = {
    "poem": "".join(f"{REFRAIN}Verse {n} is about the {n * 7}.\n" for n in range(20)),
    "rows": "".join(f"| row {n} | yes | no |\n" for n in range(60)),
    "lines": "".join(f"x[{n}] = value\n" for n in range(60)),
    "objects": json.dumps([{"name": f"item {n}", "kind": "a"} for n in range(60)]),
    "numbers": "[" + "0.25, " * 200 + "1]" + "-" * 500 + "\n" * 300,
}
WORDS = ("the ", "no ", "Berlin, ", "and the ", "don't ", "naïve… ", "нет ", "No! ")


@pytest.fixture(scope="module")
def rules() -> AnswerRules:
    tokenizer = AutoTokenizer.from_pretrained(resolve_name("bundled"), model_max_length=1 << 20)
    return AnswerRules(tokenizer, (), "bundled")


def loop_at(rules: AnswerRules, text: str, *, in_json: bool = False) -> int | None:
    """Return the number of characters after which a text or a JSON string counts as a loop."""
    grammar = parse_grammar(None, {"json": {"type": "object"}}) if in_json else None
    guard = rules.loop_guard(grammar)
    written = '{"a": ' + json.dumps(text, ensure_ascii=False) if in_json else text
    tokens = rules._tokenizer(written, add_special_tokens=False)["input_ids"]
    for count, token in enumerate(tokens, 1):
        guard.push(token)
        if guard.has_loop:
            return len(rules._decode(tokens[:count]))
    return None


@pytest.mark.parametrize("in_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("unit", DATA)
def test_equal_rows_of_data_are_not_a_loop(rules: AnswerRules, unit: str, in_json: bool) -> None:
    assert loop_at(rules, unit * DATA[unit], in_json=in_json) is None


@pytest.mark.parametrize(
    ("unit", "copies"),
    [(LETTER, 4), ("我今天去学校。", 40), ("He sat. ", 40), ("Berlin, ", 60), ("no ", 120)],
)
def test_short_repetition_of_prose_is_no_loop(rules: AnswerRules, unit: str, copies: int) -> None:
    assert loop_at(rules, unit * copies) is None


@pytest.mark.parametrize("text", LEGITIMATE.values(), ids=LEGITIMATE)
def test_ordinary_repetition_is_not_a_loop(rules: AnswerRules, text: str) -> None:
    assert loop_at(rules, text) is None


@pytest.mark.parametrize("unit", PROSE)
@pytest.mark.parametrize("in_json", [False, True], ids=["text", "json"])
def test_repeated_prose_is_a_loop(rules: AnswerRules, unit: str, in_json: bool) -> None:
    found = loop_at(rules, unit * 100, in_json=in_json)
    assert found is not None
    needed = 192 if in_json else 384
    assert 0.9 * needed < found <= max(2 * needed, 5 * len(unit) + 9)


@pytest.mark.parametrize("unit", WORDS)
@pytest.mark.parametrize("in_json", [False, True], ids=["text", "json"])
def test_repeated_words_are_a_loop(rules: AnswerRules, unit: str, in_json: bool) -> None:
    found = loop_at(rules, unit * 400, in_json=in_json)
    assert found is not None
    copies, needed = (32, 192) if in_json else (64, 384)
    least = max(needed, copies * len(unit))
    assert 0.9 * least < found <= 2.1 * least
