"""Images and audio of requests: finding them in messages, fetching them safely, and decoding them. Knows no models."""
