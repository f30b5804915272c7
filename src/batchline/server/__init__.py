"""The web application: HTTP in, a backend's answers out. Routes are thin; only the backend knows about models.

Knows a `Backend` and the API's schemas, but nothing about engines; loads neither torch nor transformers. Every error
response has the API's envelope (`boundary.py`), and a client that disconnects cancels its request (`inference.py`).
"""
