"""One message with the `anthropic` package. Start a system first: `make serve`."""

import os

from anthropic import Anthropic

client = Anthropic(base_url=os.environ.get("MILLRACE_URL", "http://127.0.0.1:8000"), api_key="none")
message = client.messages.create(
    model="tiny",
    max_tokens=16,
    extra_body={"temperature": 0},
    messages=[{"role": "user", "content": "Which city is the capital of Norway?"}],
)
print(message.content[0].text)
