"""Evaluate a small model as an agent, with optional calls, required calls and a lookup first.

    python benchmarks/small_agent.py MODEL [--questions 10] [--recipe head:4]

The model answers questions about 20 passages. It must have ChatML control tokens, like SmolLM2. Its
chat template is replaced with one that supports tools in Hermes format. The script counts optional
calls, valid required calls, required calls whose query retrieves the correct passage, and correct
answers after a lookup that precedes the model call.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from itertools import islice
from typing import Annotated, Any

import typer
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from measuring import machine

from blockattn_rag.app.demo.corpus import bundled_corpus, bundled_questions, is_correct
from blockattn_rag.langchain import (
    BlockKVTransformer,
    ChatBlockAttention,
    HashingEmbeddings,
    RetrieveFirst,
    block_retriever_tool,
)
from blockattn_rag.model.loading import load_tokenizer

TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\nYou may call functions. Their signatures are in ' }}
    {{- '<tools></tools>:\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\nFor each call, answer with a JSON object in <tool_call></tool_call>:\\n' }}
    {{- '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n' }}
    {{- '</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def main(
    model: str,
    questions: Annotated[int, typer.Option(min=1, max=10)] = 10,
    recipe: str = "auto",
) -> None:
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = TEMPLATE
    asked = bundled_questions()[:questions]
    corpus, gold = bundled_corpus(), {at for one in asked for at in one.gold}
    others = (at for at in range(len(corpus)) if at not in gold)
    chosen = sorted([*gold, *islice(others, max(0, 20 - len(gold)))])
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        chat = ChatBlockAttention(
            model=model, tokenizer=tokenizer, kv_store=folder, recipe=recipe, max_tokens=64
        )
        documents = [Document(corpus[at].text) for at in chosen]
        documents = BlockKVTransformer(llm=chat).transform_documents(documents)
        vectors = InMemoryVectorStore(HashingEmbeddings())
        vectors.add_documents(documents)
        retriever = vectors.as_retriever(search_kwargs={"k": 2})
        tool = block_retriever_tool(retriever, "look_up", "Looks facts up in an encyclopedia.")
        agent = create_agent(chat, [], middleware=[RetrieveFirst(retriever)])
        for sample in asked:
            free = chat.bind_tools([tool]).invoke(sample.question)
            counts["optional call: made"] += bool(free.tool_calls)
            counts["optional call: malformed"] += bool(free.invalid_tool_calls)
            required = chat.bind_tools([tool], tool_choice="any", parallel_tool_calls=False)
            answer = required.invoke(sample.question)
            counts["required call: valid"] += len(answer.tool_calls) == 1
            counts["required call: truncated"] += bool(answer.invalid_tool_calls)
            for call in answer.tool_calls:
                found = {one.page_content for one in retriever.invoke(call["args"]["query"])}
                right = {corpus[at].text for at in sample.gold}
                counts["required call: query finds the passage"] += right <= found
            given: Any = {"messages": [("human", sample.question)]}
            said = str(agent.invoke(given)["messages"][-1].content)
            counts["lookup first: right answer"] += is_correct(sample, said)
    for name, count in counts.items():
        print(f"{name}: {count} of {len(asked)}")
    print(machine())


if __name__ == "__main__":
    typer.run(main)
