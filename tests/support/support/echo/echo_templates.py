"""Chat templates for the engine that repeats its prompt.

The text to repeat comes first, up to a token that ends an answer.
"""

# ruff: noqa: E501 - texts as templates have them

# Supports thoughts, calls and tools; "@" in a text becomes a control token.
TOOLS = (
    "{% for m in messages %}{% if m.reasoning_content is defined %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content | replace('@', '<spare259>') }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% for t in tools or [] %}{{ t | tojson }}"
    "{% endfor %}<|im_start|>{% if enable_thinking is defined and not enable_thinking %}{% endif %}"
)
