"""Simple drawings, what there is to ask about them, and the answers: what `tiny-vision` is trained on.

A drawing has one to five shapes of one kind and one colour on a light ground. Their places, sizes and angles are drawn
at random with some space between them, so nearly no two drawings are alike. Knows nothing of tokenizers or models.
"""

from __future__ import annotations

import base64
import io
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw

COUNTS = ("one", "two", "three", "four", "five")
SHAPES = ("circle", "square", "triangle", "star")
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 150, 50),
    "blue": (40, 70, 220),
    "yellow": (240, 215, 30),
    "orange": (245, 135, 20),
    "purple": (135, 40, 160),
    "brown": (125, 75, 35),
    "black": (20, 20, 20),
}

RADII = (0.1, 0.14)  # of the picture's width; a shape lies within its circle
SIDES = (96, 192)  # pixels
QUESTIONS = {
    "what": ("What is in the picture?", "What do you see?", "Describe the picture.", "What does the picture show?"),
    "count": ("How many shapes are there?", "How many are there?", "Count the shapes.", "How many shapes do you see?"),
    "colour": ("What colour is it?", "What color is it?", "What colour are they?", "Which colour do you see?"),
    "shape": ("What shape is it?", "Which shape is it?", "What shapes are they?", "Which shape do you see?"),
}
"""Wordings of each question."""

Place = tuple[float, float, float]
"""A circle: x, y and radius in a picture of width 1."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """What a drawing shows, as indices into COUNTS, COLOURS and SHAPES."""

    count: int
    colour: int
    shape: int

    @classmethod
    def drawn(cls, rng: random.Random) -> Drawing:
        """One at random."""
        return cls(rng.randrange(len(COUNTS)), rng.randrange(len(COLOURS)), rng.randrange(len(SHAPES)))

    def answer(self, question: str) -> str:
        """The answer to a kind of question, such as `Three red circles.`"""
        colour, shape = list(COLOURS)[self.colour], SHAPES[self.shape] + ("s" if self.count else "")
        words = {"what": f"{COUNTS[self.count]} {colour} {shape}", "count": COUNTS[self.count]}
        return {**words, "colour": colour, "shape": SHAPES[self.shape]}[question].capitalize() + "."

    def places(self, rng: random.Random) -> list[Place]:
        """Where its shapes may be."""
        return _places(self.count + 1, rng)

    def picture(
        self, rng: random.Random, places: Sequence[Place] | None = None, side: int | None = None
    ) -> Image.Image:
        """The drawing with shapes at these places, in so many pixels; the rest is up to `rng`."""
        side = side or rng.randint(*SIDES)
        ground = rng.randint(235, 255)
        image = Image.new("RGB", (side, side), (ground, ground, ground))
        canvas = ImageDraw.Draw(image)
        colour = tuple(min(255, max(0, part + rng.randint(-12, 12))) for part in list(COLOURS.values())[self.colour])
        for x, y, radius in places or self.places(rng):
            _draw(canvas, SHAPES[self.shape], x * side, y * side, radius * side, rng.uniform(-0.25, 0.25), colour)
        return image


def _places(count: int, rng: random.Random) -> list[Place]:
    """Circles with space between them."""
    while True:
        size = rng.uniform(*RADII)
        places: list[Place] = []
        for _ in range(60):
            radius = size * rng.uniform(0.9, 1.1)
            x, y = (rng.uniform(radius + 0.02, 0.98 - radius) for _ in range(2))
            if all(math.dist((x, y), place[:2]) > 1.35 * (radius + place[2]) for place in places):
                places.append((x, y, radius))
            if len(places) == count:
                return places


def _draw(
    canvas: ImageDraw.ImageDraw, shape: str, x: float, y: float, radius: float, angle: float, colour: tuple[int, ...]
) -> None:
    if shape == "circle":
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
        return
    num_corners = {"square": 4, "triangle": 3, "star": 10}[shape]
    start = angle - math.pi / (4 if shape == "square" else 2)
    corners = []
    for corner in range(num_corners):
        distance = radius * (0.42 if shape == "star" and corner % 2 else 1)
        turn = start + 2 * math.pi * corner / num_corners
        corners.append((x + distance * math.cos(turn), y + distance * math.sin(turn)))
    canvas.polygon(corners, fill=colour)


def example_lines() -> list[dict[str, Any]]:
    """Batch lines with a drawing each, as a data URL, and a question of each kind in turn."""
    rng = random.Random(1)
    lines = []
    for number, question in enumerate(("what", "what", "what", "what", "count", "colour", "shape", "what")):
        drawing = Drawing(2 * number % len(COUNTS), number % len(COLOURS), number % len(SHAPES))
        file = io.BytesIO()
        drawing.picture(rng, side=128).quantize(8).save(file, "PNG", optimize=True)
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": QUESTIONS[question][0]},
        ]
        body = {"model": "tiny-vision", "messages": [{"role": "user", "content": content}], "temperature": 0}
        lines.append(
            {"custom_id": f"request-{number + 1}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        )
    return lines
