"""Structured answers with instructor, against the router at the URL in argv[1], which says `ANSWERS` one by one."""

import sys

import instructor
import openai
from pydantic import BaseModel


class City(BaseModel):
    name: str
    inhabitants: int


OSLO = {"name": "Oslo", "inhabitants": 700_000}
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "A city?"}]}
for name in ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON"):
    plain = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode[name])
    assert client.create(response_model=City, max_retries=0, **ASKED).model_dump() == OSLO, name
    parts = list(client.create_partial(response_model=City, max_retries=0, **ASKED))
    assert parts and parts[-1].model_dump() == OSLO, name  # a router that is busy sends all at once
