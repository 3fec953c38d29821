"""/tokenize and /detokenize: a prompt to the token ids that workers get, and back."""

import time

from millrace_rpc.errors import FieldError

from millrace_router.apis.openai.chat import Arguments, Conversation, FunctionTool, Turn
from millrace_router.apis.openai.types import Asking, Strict
from millrace_router.apis.parsing import Items
from millrace_router.flow import validate
from millrace_router.flow.ask import Ask, Prompt
from millrace_router.flow.inference import Inference
from millrace_router.queue.tenant import caller


class TokenizeRequest(Asking):
    model: str = ""
    prompt: str | None = None
    """Either this or `messages`."""
    messages: Items[Turn] | None = None
    """As in chat, with the further inputs of the template."""
    tools: Items[FunctionTool] | None = None
    chat_template_kwargs: Arguments | None = None

    def ask(self, request_id: str) -> Ask:
        return Ask(model=self.model, prompt=self._prompt(), request_id=request_id)

    def _prompt(self) -> Prompt:
        if (self.prompt is None) is (self.messages is None):
            raise FieldError("prompt", "or ", ("messages",), " is required, and not both")
        if self.prompt is not None:
            return self.prompt
        return Conversation(
            messages=self.messages or [], tools=self.tools or [], chat_template_kwargs=self.chat_template_kwargs or {}
        ).as_chat()


class DetokenizeRequest(Strict):
    model: str = ""
    tokens: Items[int]
    """Token ids."""
    keep_special_tokens: bool = True
    """Special tokens are part of the text."""


async def prompt_tokens(inference: Inference, ask: Ask) -> list[int]:
    """The token ids that workers would get."""
    validate.check(ask, inference.model, inference.names, inference.backend.config)
    caller.get().tenant.take(time.monotonic())
    return await inference.tokenize(ask.prompt, inference.model, ask.large)


def text_of(inference: Inference, wanted: DetokenizeRequest) -> str:
    validate.check_model(wanted.model, inference.names)
    validate.check_ids("tokens", wanted.tokens, inference.model)
    caller.get().tenant.take(time.monotonic())
    return inference.tokenizer.decode(wanted.tokens, wanted.keep_special_tokens)
