"""A streamed chat with the `openai` package. Start a system first: `make serve`."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("MILLRACE_URL", "http://127.0.0.1:8000") + "/v1", api_key="none")
[model, *_] = client.models.list()
messages = [{"role": "user", "content": "What is 123 + 456?"}]
for chunk in client.chat.completions.create(
    model=model.id, messages=messages, temperature=0, max_tokens=16, stream=True
):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
