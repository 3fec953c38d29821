"""Short templates of our own words that ask of messages what the published ones ask, and make the same prompts."""

# R1 and V3 begin the lists of calls and of results once in a prompt.
R1 = """
{%- set ns = namespace(called=false, told=false, results=0) -%}
{{ bos_token }}{{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | join('\\n\\n') }}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
    {%- set ns.told = false -%}
    {{ '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' -%}
    {{ '<｜tool▁outputs▁begin｜>' if not ns.results }}
    {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
    {%- set ns.told = true %}{% set ns.results = 1 -%}
{%- elif m.role == 'assistant' and 'tool_calls' in m -%}
    {%- for c in m.tool_calls -%}
        {{ '\\n' if ns.called else '<｜Assistant｜>' + (m.content or '') + '<｜tool▁calls▁begin｜>' }}
        {{- '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' }}
        {{- c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
        {%- set ns.called = true -%}
    {%- endfor -%}
    {{ '<｜tool▁calls▁end｜>' + eos_token }}
    {%- set ns.told = false -%}
{%- elif m.role == 'assistant' -%}
    {{ '<｜tool▁outputs▁end｜>' + m.content if ns.told else '<｜Assistant｜>' + m.content.split('</think>')[-1] }}
    {{- eos_token }}
    {%- set ns.told = false -%}
{%- endif -%}
{%- endfor -%}
{{ '<｜tool▁outputs▁end｜>' if ns.told else '<｜Assistant｜><think>\\n' }}"""
# As R1 and V3 came first, they show calls only where the content is None.
R1_FIRST = R1.replace("'tool_calls' in m", "m.content is none")
# The mark of the assistant follows the user's text; an assistant that goes on after itself gets another one.
V3_0324 = """
{%- set ns = namespace(asked=false, told=false, results=0) -%}
{{ bos_token }}{{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | join('\\n\\n') }}
{%- for m in messages -%}
{%- set text = m.content -%}
{%- if m.role == 'user' -%}
    {{ '<｜User｜>' + text + '<｜Assistant｜>' }}
    {%- set ns.told = false %}{% set ns.asked = true -%}
{%- elif m.role == 'tool' -%}
    {{ '\\n' if ns.results else '<｜tool▁outputs▁begin｜>' }}
    {{- '<｜tool▁output▁begin｜>' + text + '<｜tool▁output▁end｜>' }}
    {%- set ns.told = true %}{% set ns.asked = false %}{% set ns.results = 1 -%}
{%- elif m.role == 'assistant' -%}
    {{ '<｜tool▁outputs▁end｜>' if ns.told }}{{ text or '' }}
    {%- if 'tool_calls' in m -%}
        {{ '<｜tool▁calls▁begin｜>' }}
        {%- for c in m.tool_calls -%}
            {{ '\\n' if not loop.first }}
            {{- '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' }}
            {{- c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor -%}
        {{ '<｜tool▁calls▁end｜>' }}
        {%- set ns.results = 0 -%}
    {%- endif -%}
    {{ eos_token }}
    {%- set ns.told = false %}{% set ns.asked = false -%}
{%- endif -%}
{%- endfor -%}
{{ '<｜tool▁outputs▁end｜>' if ns.told else '<｜Assistant｜>' if not ns.asked }}"""
# R1-0528 cuts reasoning off, and so asks a content of None what it contains.
R1_0528 = V3_0324.replace(
    "{%- set text = m.content -%}",
    """{%- set text = m.content -%}
{%- if m.role == 'assistant' and '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif -%}""",
)
V31 = """
{%- set ns = namespace(asked=false, told=false) -%}
{{ bos_token }}{{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | join('\\n\\n') }}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
    {{ '<｜User｜>' + m.content }}
    {%- set ns.told = false %}{% set ns.asked = true -%}
{%- elif m.role == 'tool' -%}
    {{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
    {%- set ns.told = true %}{% set ns.asked = false -%}
{%- elif m.role == 'assistant' -%}
    {{ '<｜Assistant｜></think>' if ns.asked }}
    {%- if 'tool_calls' in m -%}
        {{ ('' if m.content is none else m.content) + '<｜tool▁calls▁begin｜>' }}
        {%- for c in m.tool_calls -%}
            {{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}
            {{- '<｜tool▁call▁end｜>' }}
        {%- endfor -%}
        {{ '<｜tool▁calls▁end｜>' }}
    {%- else -%}
        {{ m.content if ns.told else m.content.split('</think>', 1)[-1] }}
    {%- endif -%}
    {{ eos_token }}
    {%- set ns.told = false %}{% set ns.asked = false -%}
{%- endif -%}
{%- endfor -%}
{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') if ns.asked }}"""
KIMI_K2 = """
{%- if tools -%}
    {{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson(separators=(',', ':')) + '<|im_end|>' }}
{%- endif -%}
{%- if messages[0].role != 'system' -%}
    {{ '<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>' }}
{%- endif -%}
{%- for m in messages -%}
{{ '<|im_' + (m.role if m.role in ('user', 'assistant') else 'system') + '|>' + (m.name or m.role) + '<|im_middle|>' }}
{%- if m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\\n' }}{% endif -%}
{{ m.content if m.content is string }}
{%- if m.tool_calls -%}
    {{ '<|tool_calls_section_begin|>' }}
    {%- for c in m.tool_calls -%}
        {{ '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' + c.function.arguments + '<|tool_call_end|>' }}
    {%- endfor -%}
    {{ '<|tool_calls_section_end|>' }}
{%- endif -%}
{{ '<|im_end|>' }}
{%- endfor -%}
{{ '<|im_assistant|>assistant<|im_middle|>' }}"""
# As it came first, it iterates over a content that is no text.
KIMI_FIRST = KIMI_K2.replace(
    "{{ m.content if m.content is string }}",
    "{{ m.content if m.content is string else m.content | join }}",
)
# K2 Thinking shows the reasoning behind the last answer that is no call.
KIMI_THINKING = KIMI_K2.replace(
    "{{ m.content if",
    """{%- if m.role == 'assistant' -%}
    {%- set later = messages[loop.index0:] | selectattr('role', 'eq', 'assistant') | rejectattr('tool_calls') | list -%}
    {{ '<think>' + ('' if later else m.get('reasoning_content', '')) + '</think>' }}
{%- endif -%}
{{ m.content if""",
)
