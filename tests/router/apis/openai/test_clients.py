"""Frameworks that agents are made with, each through its own client against a router."""

import json
import os
from collections.abc import Callable
from typing import Any

os.environ |= {"LANGSMITH_TRACING": "false", "OPENAI_AGENTS_DISABLE_TRACING": "1"}

import agents
import pytest
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, RunConfig, Runner, function_tool
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from millrace_router.text import markers
from pydantic import BaseModel
from router.apis.openai.test_openai_tools import client_of
from router.apis.openai.test_vendor_helpers import OSLO, City
from router.harness import Cluster
from router.scripted import grammar_of, prompt_of, say
from router.text.test_parsers import v31, v32

# --------------------------------------------------------------------------------------------------------- LangChain


@tool
def weather(city: str) -> str:
    """Of a city."""
    return f"sunny in {city}"


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
async def langchain(request: pytest.FixtureRequest, serve: Callable) -> tuple[Cluster, Callable[..., ChatOpenAI]]:
    made: Cluster = await serve("v31")

    def model(**more: Any) -> ChatOpenAI:
        return ChatOpenAI(
            base_url=f"{made.url}/v1",
            api_key="none",
            model="tiny",
            use_responses_api=request.param,
            max_retries=0,
            **more,
        )

    return made, model


@pytest.mark.parametrize("stream", [False, True])
async def test_langchain_runs_tools_in_both_apis(
    stream: bool, langchain: tuple[Cluster, Callable[..., ChatOpenAI]]
) -> None:
    made, model = langchain
    able = model().bind_tools([weather])
    messages: list[Any] = [HumanMessage("Weather?")]
    for city in ("Oslo", "Rome", ""):
        say(made, "I look." + v31(("weather", json.dumps({"city": city}))) if city else "Both are sunny.")
        if stream:
            answer = None
            async for chunk in able.astream(messages):
                answer = chunk if answer is None else answer + chunk
        else:
            answer = await able.ainvoke(messages)
        messages.append(answer)
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == (
            [("weather", {"city": city})] if city else []
        )
        messages += [await weather.ainvoke(call) for call in answer.tool_calls]
        assert all(isinstance(message, ToolMessage) for message in messages[-len(answer.tool_calls) or len(messages) :])
    assert answer.text == "Both are sunny."
    assert prompt_of(made).index("sunny in Oslo") < prompt_of(made).index("sunny in Rome")


async def test_langchain_knows_what_does_not_fit(langchain: tuple[Cluster, Callable[..., ChatOpenAI]]) -> None:
    _, model = langchain
    with pytest.raises(ContextOverflowError):
        await model().ainvoke("x" * 90_000)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("strict", [None, True])
async def test_langchain_structured_output(
    method: str, strict: bool | None, langchain: tuple[Cluster, Callable[..., ChatOpenAI]]
) -> None:
    made, model = langchain
    if method == "json_mode" and strict:
        return
    said = OSLO.model_dump_json()
    say(made, v31(("City", said)) if method == "function_calling" else said)
    answer = await model().with_structured_output(City, method=method, strict=strict).ainvoke("A city, as JSON")
    assert answer == OSLO and grammar_of(made) is not None


# ---------------------------------------------------------------------------------------------------- OpenAI's agents


@function_tool
def look_up(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


@function_tool
async def clock(zone: str = "UTC") -> str:
    return f"noon in {zone}"


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
async def agent(request: pytest.FixtureRequest, serve: Callable) -> tuple[Cluster, Callable[..., Agent]]:
    made: Cluster = await serve("v32")
    kind = OpenAIResponsesModel if request.param else OpenAIChatCompletionsModel

    def new(name: str = "Helper", **more: Any) -> Agent:
        return Agent(name=name, model=kind(model="tiny", openai_client=client_of(made)), **more)

    return made, new


async def run(agent: Agent, asked: Any, stream: bool) -> Any:
    config = RunConfig(tracing_disabled=True)
    if not stream:
        return await Runner.run(agent, asked, run_config=config)
    result = Runner.run_streamed(agent, asked, run_config=config)
    text = ""
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text += event.data.delta
    assert isinstance(result.final_output, BaseModel) or text.endswith(result.final_output)
    return result


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_agents_run_tools(stream: bool, agent: tuple[Cluster, Callable[..., Agent]]) -> None:
    made, new = agent
    helper = new(instructions="Use tools.", tools=[look_up, clock])
    say(made, "I look." + v32(("look_up", '{"city": "Oslo"}'), ("clock", '{"zone": "CET"}')))
    say(made, v32(("look_up", '{"city": "Rome"}')))
    say(made, "All is well.")
    result = await run(helper, "Weather?", stream)
    assert result.final_output == "All is well."
    prompt = prompt_of(made)
    assert prompt.index("Use tools.") < prompt.index("sunny in Oslo") < prompt.index("noon in CET")
    assert prompt.index("noon in CET") < prompt.index("sunny in Rome") and "None" not in prompt
    say(made, "Again.")  # the next turn has all of this one
    again = await run(helper, [*result.to_input_list(), {"role": "user", "content": "And now?"}], stream)
    assert again.final_output == "Again." and prompt_of(made).index("All is well.") < prompt_of(made).index("And now?")
    await made.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_agents_typed_output(stream: bool, agent: tuple[Cluster, Callable[..., Agent]]) -> None:
    made, new = agent
    say(made, OSLO.model_dump_json())
    result = await run(new(output_type=City), "A city?", stream)
    assert result.final_output == OSLO and "inhabitants" in grammar_of(made).json_schema


@pytest.mark.parametrize("api", ["chat_completions", "responses"])
async def test_openai_agents_settings(api: str, serve: Callable) -> None:
    """Every setting of the framework that has a value of ours."""
    made: Cluster = await serve("v32")
    settings = agents.ModelSettings(
        temperature=0.5, top_p=0.9, tool_choice="auto", parallel_tool_calls=False, max_tokens=99,
        reasoning={"effort": "low", "summary": "auto"}, verbosity="low", metadata={"a": "b"}, store=False,
        include_usage=True, prompt_cache_retention="24h", truncation="disabled" if api == "responses" else None,
        response_include=["reasoning.encrypted_content", "web_search_call.action.sources"],
    )  # fmt: skip
    kind = OpenAIResponsesModel if api == "responses" else OpenAIChatCompletionsModel
    helper = Agent(
        name="x", model=kind(model="tiny", openai_client=client_of(made)), tools=[look_up], model_settings=settings
    )
    for stream in (False, True):
        say(made, f"Hm.{markers.THINK_END}" + v32(("look_up", '{"city": "Oslo"}')))
        say(made, f"So.{markers.THINK_END}Sunny.")
        result = await run(helper, "Weather?", stream)
        assert result.final_output == "Sunny." and result.context_wrapper.usage.requests == 2
        assert made.decodes[0].submitted[-1].sampling.temperature == 0.5
