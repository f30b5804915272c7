"""Engines of other projects (vLLM, SGLang, llama.cpp) as child processes, driven over HTTP on this machine."""
