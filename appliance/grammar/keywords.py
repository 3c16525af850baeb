"""JSON Schema's keywords, by what becomes of them here.

Names are those of draft 2020-12, and of earlier drafts where they differ.
"""

from __future__ import annotations

TYPES = ("null", "boolean", "number", "string", "array", "object")

# Checked; any other format says nothing, as the specification has it.
FORMATS = (
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
)  # fmt: skip

DRAFTS = (
    "https://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
    "http://json-schema.org/draft-06/schema",
    "http://json-schema.org/draft-04/schema",
)

# The compiler's own.
COMPILED = (
    "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const", "enum",
    "exclusiveMaximum", "exclusiveMinimum", "format", "items", "maxItems", "maxLength",
    "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf",
    "oneOf", "pattern", "patternProperties", "prefixItems", "properties", "required", "type",
)  # fmt: skip

# Rewritten in the compiler's where that is exact, or else refused by name.
REWRITTEN = (
    "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if",
    "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems",
    "unevaluatedProperties", "uniqueItems",
)  # fmt: skip

REFUSED = ("$dynamicRef", "$recursiveRef")

ASSERTIONS = frozenset((*COMPILED, *REWRITTEN, *REFUSED))  # whatever else says nothing

COUNTS = (
    "maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems",
    "minLength", "minProperties",
)  # fmt: skip
BOUNDS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf")
