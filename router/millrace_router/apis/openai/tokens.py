"""/tokenize and /detokenize: a prompt to the token ids that workers get, and back."""

from millrace_rpc.errors import FieldError

from millrace_router.apis.openai.chat import Arguments, Conversation, FunctionTool, Turn
from millrace_router.apis.openai.types import Asking, Strict
from millrace_router.apis.parsing import Items
from millrace_router.flow.ask import Ask, Prompt


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
