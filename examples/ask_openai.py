"""Use OpenAI's client: python examples/ask_openai.py http://localhost:8000/blockattn/openai/v1"""

import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
model = client.models.list().data[0].id
documents = [{"title": "Halden Tower", "text": "The height of Halden Tower is 214 metres."}]
for _ in range(2):
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the height of Halden Tower?"}],
        temperature=0,
        extra_body={"documents": documents},
    )
    print(answer.choices[0].message.content)
    print(answer.usage.prompt_tokens_details.cached_tokens, "cached tokens;", answer.blockattn)
