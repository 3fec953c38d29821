"""Workers that say what a test wants, for models of every chat format."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

from millrace.v1 import common_pb2, worker_pb2
from millrace_router.text import markers
from router.fake_worker import PREFILL, FakeWorker
from router.harness import EOS, TEMPLATE, Cluster, write_tokenizer

HELLO = [{"role": "user", "content": "Weather?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]
VOCABULARIES = {"kimi": markers.KIMI, "v32": (*markers.DEEPSEEK, markers.DSML)}


def template(form: str, thinking: str = "") -> str:
    """`thinking` ends the prompt."""
    hint = "{# ```json #}" if form == "v3" else ""
    return hint + TEMPLATE + thinking


def write_formats(new_folder: Callable[[str], Path]) -> dict[str, Path]:
    """A model of each chat format, by name."""
    templates: dict[str, str | None] = {
        "v3": template("v3"),
        "v31": template("v31", "{{ '<think>' if thinking else '</think>' }}"),
        "r1": template("v3", "<think>\n"),
        "takes": "{{ tools | tojson if tools }}" + TEMPLATE,
    }
    templates |= {"kimi": "{{ tools | tojson(separators=(',', ':')) if tools }}" + TEMPLATE, "v32": None}
    reasoning = markers.THINK, markers.THINK_END
    return {
        name: write_tokenizer(new_folder(name), text, (*reasoning, *VOCABULARIES.get(name, markers.DEEPSEEK)))
        for name, text in templates.items()
    }


def say(made: Cluster, text: str, finish: int = common_pb2.FINISH_REASON_STOP) -> int:
    """Both workers answer the next request with `text` and the end of the sequence. The number of tokens."""
    tokenizer = made.router.inference.tokenizer
    ids = tokenizer._encode(text + (EOS if finish == common_pb2.FINISH_REASON_STOP else ""), add_bos=False)

    async def behave(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator[worker_pb2.SequenceOutput]:
        count = 1 if worker.role == PREFILL else len(ids)
        for i in range(count):
            last = finish if i + 1 == len(ids) else 0
            yield worker_pb2.SequenceOutput(id=request.id, first_index=i, token_ids=ids[i : i + 1], finish_reason=last)

    made.prefills[0].script.append(behave)
    made.decodes[0].script.append(behave)
    return len(ids)


def prompt_of(made: Cluster) -> str:
    return made.router.inference.tokenizer.decode(made.prefills[-1].submitted[-1].token_ids, keep_special=True)


def grammar_of(made: Cluster) -> common_pb2.Grammar | None:
    sampling = made.decodes[0].submitted[-1].sampling
    assert sampling == made.prefills[0].submitted[-1].sampling
    return sampling.grammar if sampling.HasField("grammar") else None
