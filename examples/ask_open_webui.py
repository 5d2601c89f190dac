"""Ask Open WebUI two questions about attached notes, and print how many tokens were reused.

Start Open WebUI with WEBUI_AUTH=false, so that it needs no login, and run:

    python examples/ask_open_webui.py http://127.0.0.1:8080

Both questions include the same note, at different positions in the conversation.
"""

import sys
import time

import httpx

NOTES = {
    name: f"The {property} of {name} is {value}. {name} is open every day except Monday. Visitors "
    f"reach {name} by the tram of line 7, which runs every ten minutes. A guide shows groups "
    f"around {name} twice a day; the tour takes an hour and costs nothing."
    for name, property, value in (
        ("Halden Tower", "height", "214 metres"),
        ("Tove Lake", "depth", "31 metres"),
        ("Brisk Hall", "width", "48 metres"),
    )
}


def main(url: str) -> None:
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
        login = client.post("/api/v1/auths/signin", json={"email": "", "password": ""})
        client.headers["Authorization"] = f"Bearer {_json(login)['token']}"
        model = _json(client.get("/api/models"))["data"][0]["id"]
        files = [_uploaded(client, name, text) for name, text in NOTES.items()]
        messages = []
        for question, attached in (
            ("What is the height of Halden Tower?", files[:2]),
            ("What is the depth of Tove Lake?", files[1:]),
        ):
            messages.append({"role": "user", "content": question})
            body = {"model": model, "messages": messages, "files": attached}
            body |= {"temperature": 0, "max_tokens": 24}
            answer = _json(client.post("/api/chat/completions", json=body))
            messages.append(answer["choices"][0]["message"])
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            print(messages[-1]["content"])
            print(f"{cached} of {usage['prompt_tokens']} tokens cached; {answer['blockattn']}")


def _uploaded(client: httpx.Client, name: str, text: str) -> dict[str, str]:
    file = _json(client.post("/api/v1/files/", files={"file": (f"{name}.txt", text)}))
    while _json(client.get(f"/api/v1/files/{file['id']}/process/status"))["status"] in (
        "pending",
        "processing",
    ):
        time.sleep(0.5)
    return {"type": "file", "id": file["id"]}


def _json(response: httpx.Response) -> dict:
    return response.raise_for_status().json()


if __name__ == "__main__":
    main(sys.argv[1])
