"""Chat templates of model families, simplified from the originals. Each keeps the control tokens,
the order of roles, the format of tools, calls and results, and what is trimmed or omitted.
``tests/output/test_tool_templates.py`` has the documented prompts."""

from __future__ import annotations

_CHATML_TOOLS = """
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and ' }}
{{- 'arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
"""

_CHATML_CALLS = """
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}"""

_CHATML_RESULT = """
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}"""

_CHATML_TURNS = (
    """
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first or message.role == 'user' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
"""
    + _CHATML_CALLS
    + """
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
"""
    + _CHATML_RESULT
    + """
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
)

QWEN25 = (
    """
{%- set system = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% endif %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}{{ '\\n\\n' }}"""
    + _CHATML_TOOLS
    + """{%- endif %}{{ '<|im_end|>\\n' }}"""
    + _CHATML_TURNS
)

QWEN3 = (
    """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}"""
    + _CHATML_TOOLS
    + """{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}"""
    + _CHATML_TURNS
    + """
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}"""
)

# With thoughts, which are omitted from earlier turns.
QWEN3_THINKING = (
    """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and message.content is string
        and not (message.content.startswith('<tool_response>')
                 and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thinking = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thinking = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].rstrip('\\n') %}
            {%- set thinking = thinking.split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or thinking) %}
            {{- '<think>\\n' + thinking.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
"""
    + _CHATML_CALLS
    + """
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}"""
    + _CHATML_RESULT
    + """
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
)

LLAMA31 = """
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{ 'Environment: ipython\\n' }}{% endif %}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\n' }}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if tools and loop.first %}
        {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
        {{- 'Given the following functions, please respond with a JSON for a function call with ' }}
        {{- 'its proper arguments that best answers the given prompt.\\n\\n' }}
        {{- 'Respond in the format {"name": function name, "parameters": ' }}
        {{- 'dictionary of argument name and its value}.Do not use variables.\\n\\n' }}
        {%- for tool in tools %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {{- message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_MISTRAL_CHECK = """
{%- for message in messages %}
    {%- for call in message.tool_calls or [] if call.id | length != 9 %}
        {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
    {%- endfor %}
{%- endfor %}
"""

MISTRAL_V3 = (
    _MISTRAL_CHECK
    + """{{- '<s>' }}
{%- set last = messages | selectattr('role', 'equalto', 'user') | list | last %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == last %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last }}
        {%- endfor %}
        {{- ']</s>' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + '</s>' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
)

MISTRAL_V13 = (
    _MISTRAL_CHECK
    + """{{- '<s>' }}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'user' %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
            {{- call.function.arguments | tojson }}
        {%- endfor %}
        {{- '</s>' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' }}
        {{- message.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
)

GRANITE33 = """
{%- if tools and not available_tools %}{% set available_tools = tools %}{% endif %}
{%- set system = 'Knowledge Cutoff Date: April 2024.\\nYou are Granite, developed by IBM.' %}
{%- if available_tools %}
    {%- set system = system + ' You are a helpful assistant with access to the following tools. '
        + 'When a tool is required to answer the user\\'s query, respond only with <|tool_call|> '
        + 'followed by a JSON list of tools used. If a tool does not exist in the provided list of '
        + 'tools, notify the user that you do not have the ability to fulfill the request.' %}
{%- else %}
    {%- set system = system + ' You are a helpful AI assistant.' %}
{%- endif %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\\n' }}
{%- if available_tools %}
    {{- '<|start_of_role|>available_tools<|end_of_role|>' + available_tools | tojson(indent=4) }}
    {{- '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content }}
    {{- '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}
"""

SMOLLM3 = """
{%- set instructions = 'You are a helpful AI assistant named SmolLM, trained by Hugging Face.' %}
{%- if messages[0].role == 'system' %}
    {%- set instructions = messages[0].content %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|im_start|>system\\n## Metadata\\n\\nKnowledge Cutoff Date: June 2025\\n' }}
{{- 'Reasoning Mode: /no_think\\n\\n## Custom Instructions\\n\\n' + instructions + '\\n\\n' }}
{%- if xml_tools %}
    {{- '### Tools\\n\\nYou may call one or more functions to assist with the user query.\\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n\\n' }}
    {{- '<tools>\\n' }}
    {%- for tool in xml_tools %}{{ tool | string + '\\n' }}{% endfor %}
    {{- '</tools>\\n\\nFor each function call, return a json object with function name and ' }}
    {{- 'arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>\\n\\n' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'tool' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' + message.content.lstrip('\\n') }}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' }}{% endif %}
"""

QWEN3_CODER = """
{%- for tool in tools or [] %}{{ '<function>' + tool.function.name + '</function>' }}{% endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments | items %}
            {{- '<parameter=' + name + '>\\n' + value + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
"""

# Calls are written only if the content is None, as in the original; arguments are a string.
DEEPSEEK_R1 = """
{%- set ns = namespace(after_tool=false, first_result=true, system='') %}
{%- for message in messages if message.role == 'system' %}
    {%- set ns.system = message.content %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.after_tool = false %}
        {{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' and message.content is none %}
        {%- for call in message.tool_calls %}
            {{- '<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + call.type }}
            {{- '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
            {{- call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if ns.after_tool %}
            {{- '<｜tool▁outputs▁end｜>' + content + '<｜end▁of▁sentence｜>' }}
            {%- set ns.after_tool = false %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set content = content.split('</think>')[-1] %}
            {%- endif %}
            {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {%- set ns.after_tool = true %}
        {{- '<｜tool▁outputs▁begin｜>' if ns.first_result else '\\n' }}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
        {%- set ns.first_result = false %}
    {%- endif %}
{%- endfor %}
{%- if ns.after_tool %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}
{%- if add_generation_prompt and not ns.after_tool %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}
"""

GEMMA = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/...') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

# The system message goes into the last message, or is dropped if that is not a user message.
MISTRAL = """
{%- set spoken = messages %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set spoken = messages[1:] %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in spoken %}
    {%- if message.role != 'tool' and not message.tool_calls %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('Conversation roles must alternate user/assistant/user/...') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in spoken %}
    {%- if message.role == 'user' and loop.last and system is defined %}
        {{- '[INST]' + system + '\\n\\n' + message.content + '[/INST]' }}
    {%- elif message.role == 'user' %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be strings with length 9!') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- '' if loop.last else ', ' }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content | string + ', ' }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""

PHI3 = """
{%- for message in messages %}
    {%- if message.role == 'system' and message.content %}
        {{- '<|system|>\\n' + message.content + '<|end|>\\n' }}
    {%- elif message.role == 'user' %}
        {{- '<|user|>\\n' + message.content + '<|end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>\\n' + message.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token }}
"""

PHI4 = """
{%- for message in messages %}
    {%- if message.role in ('system', 'user', 'assistant') %}
        {{- '<|im_start|>' + message.role + '<|im_sep|>' + message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}
"""
