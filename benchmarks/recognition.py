"""Measure recognition: passages found in prompts of common pipelines, false matches, and cost.

    python benchmarks/recognition.py > benchmarks/results/recognition.json

Prompts come from the frameworks themselves: LlamaIndex's synthesizers and LangChain's stuff chain
run with a model that records its prompts. Open WebUI's default template is data in this file.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.bridge.pydantic import Field
from llama_index.core.llms.mock import MockLLM
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from measuring import machine
from tqdm import tqdm

from blockattn_rag.prompts.blocks import Span
from blockattn_rag.prompts.formats import BLOCK_ATTENTION, CHAT, Passage
from blockattn_rag.prompts.recognition import PassageMatcher, entries_of

OPEN_WEBUI = """### Task:
Respond to the user query using the provided context, incorporating inline citations in the format \
[id] **only when the <source> tag includes an explicit id attribute** (e.g., <source id="1">).

### Guidelines:
- If you don't know the answer, clearly state that.
- If uncertain, ask the user for clarification.
- Respond in the same language as the user's query.
- If the context is unreadable or of poor quality, inform the user and provide the best possible \
answer.
- If the answer isn't present in the context but you possess the knowledge, explain this to the \
user and provide the answer using your own understanding.
- **Only include inline citations using [id] (e.g., [1], [2]) when the <source> tag includes an id \
attribute.**
- Do not cite if the <source> tag does not contain an id attribute.
- Do not use XML tags in your response.
- Ensure citations are concise and directly related to the information provided.

### Output:
Provide a clear and direct response to the user's query, including inline citations in the format \
[id] only when the <source> tag with id attribute is present in the context.

<context>
{context}
</context>

<user_query>
{query}
</user_query>
"""

SYLLABLES = [f"{a}{b}{c}" for a in "bdfgklmnprstv" for b in "aeiou" for c in ("", "n", "r", "st")]


class Writer:
    """Writes random passages and questions, which depend only on the seed.

    A third of the passages start with the name of their document, as if a splitter added headers.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._words = [
            "".join(self._random.choices(SYLLABLES, k=count)) for count in (1, 2, 3) * 2000
        ]

    def sentence(self) -> str:
        words = self._random.choices(self._words, k=self._random.randrange(6, 24))
        return f"{' '.join(words).capitalize()}."

    def passage(self) -> str:
        """A passage of about 200 to 2,000 characters."""
        text = " ".join(self.sentence() for _ in range(self._random.randrange(2, 20)))
        if self._random.random() < 1 / 3:
            number = self._random.randrange(200)
            return f"Document: The handbook of the company, part {number:03}\n\n{text}"
        return text

    def question(self) -> str:
        return f"What of {' '.join(self._random.choices(self._words, k=6))}?"


class Recording(MockLLM):
    """A model that records the prompts that it gets."""

    prompts: list[str] = Field(default_factory=list)

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=32_768)

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        self.prompts.append(prompt)
        return super().complete("The answer so far.", formatted)


def llama_index(mode: str, question: str, passages: Sequence[str]) -> list[str]:
    llm = Recording()
    synthesizer = get_response_synthesizer(llm=llm, response_mode=mode)
    nodes = [NodeWithScore(node=TextNode(text=text), score=1.0) for text in passages]
    synthesizer.synthesize(question, nodes)
    return llm.prompts


def stuff_chain(question: str, passages: Sequence[str]) -> list[str]:
    prompts: list[str] = []
    template = ChatPromptTemplate.from_messages(
        [("system", "Answer from this context only:\n\n{context}"), ("human", "{input}")]
    )
    record = RunnableLambda(lambda given: prompts.append(given.to_string()) or "An answer.")
    chain = create_stuff_documents_chain(record, template)
    chain.invoke({"input": question, "context": [Document(text) for text in passages]})
    return prompts


def open_webui(question: str, passages: Sequence[str]) -> list[str]:
    sources = (
        f'<source id="{number}" name="file-{number}.pdf">{text}</source>'
        for number, text in enumerate(passages, start=1)
    )
    return [OPEN_WEBUI.format(context="\n".join(sources), query=question)]


def own_templates(question: str, passages: Sequence[str]) -> list[str]:
    given = [Passage("", text) for text in passages]
    plain = SimpleNamespace(chat_template=None)
    return [one.prompt(question, given, plain).text for one in (CHAT, BLOCK_ATTENTION)]


SHAPES: dict[str, Callable[[str, Sequence[str]], list[str]]] = {
    "our templates": own_templates,
    "Open WebUI, default template": open_webui,
    "LangChain, stuff chain": stuff_chain,
    "LlamaIndex, compact": lambda *given: llama_index("compact", *given),
    "LlamaIndex, refine": lambda *given: llama_index("refine", *given),
}


def found(matcher: PassageMatcher, prompt: str) -> list[str]:
    spans = matcher.split([Span(prompt, "conversation")])
    return [span.text for span in spans if span.origin == "passage"]


def shares(matcher: PassageMatcher, writer: Writer, known: Sequence[str], prompts: int) -> Any:
    """Counts of given, found and wrong passages, by shape of the prompt."""
    rows = []
    for name, shape in SHAPES.items():
        given = right = wrong = count = 0
        while count < prompts // len(SHAPES):
            passages = random.Random(count).sample(known, 8)
            for prompt in shape(writer.question(), passages):
                there = [text for text in passages if text in prompt]
                matches = found(matcher, prompt)
                count, given = count + 1, given + len(there)
                right += len(set(there) & set(matches))
                wrong += len(set(matches) - set(there))
        rows.append({"shape": name, "prompts": count, "given": given, "found": right})
        rows[-1]["wrong"] = wrong
    return rows


def cost(matcher: PassageMatcher, writer: Writer, known: Sequence[str], characters: int) -> Any:
    """Milliseconds of processor time for a prompt with known passages, and for a prompt without."""
    rows = {}
    for name, passage in (("known", lambda: random.choice(known)), ("unknown", writer.passage)):
        prompts = []
        for _ in range(50):
            text = ""
            while len(text) < characters:
                text += passage() + "\n\n"
            prompts.append(text[:characters])
        times = []
        for prompt in prompts * 6:
            began = time.thread_time()
            found(matcher, prompt)
            times.append(1000 * (time.thread_time() - began))
        times = times[len(prompts) :]  # Leave out the first round.
        cuts = statistics.quantiles(times, n=100)
        rows[name] = {"median_ms": statistics.median(times), "p95_ms": cuts[94]}
    return rows


def main(
    indexed: Annotated[int, typer.Option(help="Indexed passages.")] = 100_000,
    prompts: Annotated[int, typer.Option(help="Prompts with known passages.")] = 1_000,
    others: Annotated[int, typer.Option(help="Prompts without known passages.")] = 10_000,
    characters: Annotated[int, typer.Option(help="Characters of the measured prompts.")] = 36_000,
) -> None:
    """Measure recognition, and print the results as JSON."""
    writer = Writer(0)
    known = [writer.passage() for _ in tqdm(range(indexed), desc="Writing passages")]
    began = time.perf_counter()
    entries = entries_of(known)
    indexing_s = time.perf_counter() - began
    began = time.perf_counter()
    matcher = PassageMatcher(entries)
    loading_s = time.perf_counter() - began
    false = 0
    for _ in tqdm(range(others), desc="Prompts without"):
        false += len(found(matcher, "\n\n".join(writer.passage() for _ in range(5))))
    results = {
        "machine": machine(),
        "indexed": indexed,
        "index_bytes": entries.nbytes,
        "indexing_us_per_passage": 1e6 * indexing_s / indexed,
        "loading_ms": 1000 * loading_s,
        "characters": characters,
        "cost": cost(matcher, writer, known, characters),
        "shapes": shares(matcher, writer, known, prompts),
        "prompts_without": others,
        "false_matches": false,
    }
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    typer.run(main)
