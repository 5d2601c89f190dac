"""Chat templates of the model families, after the originals, as far as prompts depend on them.

Kept of each original: its control tokens, who may speak and in which order, how tool calls and
tool results are written (``tojson`` in Llama 3), what is trimmed, and what is left out (thinking).
"""

from __future__ import annotations

LLAMA3 = """
{{- bos_token }}
{%- set system = '' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\n' }}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- elif message.role in ('tool', 'ipython') %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_CHATML_CALLS = """
            {%- for call in message.tool_calls %}
                {%- set call = call.function if call.function is defined else call %}
                {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
                {{- call.arguments | tojson }}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
"""

_CHATML_RESULT = """
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
"""

QWEN25 = (
    """
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first)
        or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}"""
    + _CHATML_CALLS
    + """
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}"""
    + _CHATML_RESULT
    + """
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
)

QWEN3 = (
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
        {%- if message.tool_calls %}"""
    + _CHATML_CALLS
    + """
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}"""
    + _CHATML_RESULT
    + """
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
)

# Calls are written only where the content is none, as in the original; arguments are a string.
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
{%- if ns.after_tool %}
    {{- '<｜tool▁outputs▁end｜>' }}
{%- endif %}
{%- if add_generation_prompt and not ns.after_tool %}
    {{- '<｜Assistant｜><think>\\n' }}
{%- endif %}
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
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""

# The system message goes into the last user message, and nowhere if that is not the last message.
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
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant<|im_sep|>' }}
{%- endif %}
"""
