"""Chat templates with tools, short ones in the manner of each family."""

_CHATML_CALLS = (
    "{% for call in message.tool_calls or [] %}{{ '\\n' }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
HERMES = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    + _CHATML_CALLS
    + "<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (
    HERMES.replace(
        "{{ message.content }}",
        "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
        "{{ message.content }}",
    )
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
R1 = (
    "{% for message in messages %}{{ message.role }}: {{ message.content.split('</think>')[-1] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<think>\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>"
    "{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>\n\n"
    "{% if tools and loop.last %}{{ tools | tojson(indent=4) }}\n\n{% endif %}"
    "{% if message.tool_calls %}{% set call = message.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% else %}{{ message.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for message in messages %}{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]"
    "{% elif message.role == 'tool' %}"
    '[TOOL_RESULTS]{"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}"
    "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
MISTRAL_ARGS = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for message in messages %}{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]"
    "{% elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]"
    "{% else %}{{ message.content }}{% for call in message.tool_calls or [] %}"
    "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)
PHI4 = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if tools and message.role == 'system' %}<|tool|>{{ tools | tojson }}<|/tool|>{% endif %}"
    "{% if message.tool_calls %}<|tool_call|>{{ message.tool_calls | map(attribute='function') | list | tojson }}"
    "<|/tool_call|>{% endif %}<|end|>{% endfor %}<|assistant|>"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message.role }}\n"
    "{% if loop.first and tools %}{{ tools | tojson(indent=2) }}\n{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}```tool_code\n{{ call.function.name }}("
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }}{% endfor %})\n```"
    "{% endfor %}<end_of_turn>\n{% endfor %}<start_of_turn>model\n"
)
DEEPSEEK = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{% if message.role == 'tool' %}<｜tool▁output▁begin｜>{{ message.content }}<｜tool▁output▁end｜>"
    "{% elif message.tool_calls %}{{ message.content }}<｜tool▁calls▁begin｜>{% for call in message.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' "
    "+ call.function.arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}{% if not loop.last %}{{ '\\n' }}{% endif %}"
    "{% endfor %}<｜tool▁calls▁end｜>{% else %}{{ message.content.split('</think>')[-1] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\\n{% endif %}"
)
# Family -> a template.
TOOL_TEMPLATES = {
    "hermes": HERMES,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral_args": MISTRAL_ARGS,
    "phi4": PHI4,
    "gemma": GEMMA,
    "deepseek": DEEPSEEK,
}
