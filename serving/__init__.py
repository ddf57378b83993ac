"""OpenAI-compatible HTTP server. Talks to the engine through requests and events; never imports JAX."""
