"""The OpenAI API over HTTP: one file per noun, and what they share (schema, sse, auth, errors)."""
