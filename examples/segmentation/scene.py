"""Draws one street scene: an image and its mask of ADE20K class ids."""

from __future__ import annotations

import colorsys

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

WIDTH, HEIGHT = 192, 160

# ADE20K's ids (position in the list of 150, counted from 1).
OTHER, BUILDING, SKY, TREE, ROAD, GRASS, PERSON, CAR = 0, 2, 3, 5, 7, 10, 13, 21
CLASSES = (BUILDING, SKY, TREE, ROAD, GRASS, PERSON, CAR)


class _Canvas:
    """An image and its mask. Each shape is drawn on both."""

    def __init__(self):
        self.image = Image.new("RGB", (WIDTH, HEIGHT))
        self.mask = Image.new("L", (WIDTH, HEIGHT))
        self._draw = ImageDraw.Draw(self.image)
        self._draw_mask = ImageDraw.Draw(self.mask)

    def rectangle(self, box, colour, label=None):
        self._draw.rectangle(box, fill=colour)
        if label is not None:
            self._draw_mask.rectangle(box, fill=label)

    def polygon(self, points, colour, label=None):
        self._draw.polygon(points, fill=colour)
        if label is not None:
            self._draw_mask.polygon(points, fill=label)

    def ellipse(self, box, colour, label=None):
        self._draw.ellipse(box, fill=colour)
        if label is not None:
            self._draw_mask.ellipse(box, fill=label)


def draw_scene(seed) -> tuple[Image.Image, Image.Image]:
    """Return an RGB image and an 8-bit mask, both 192 x 160. Both depend on `seed` alone."""
    rng = np.random.RandomState(seed)
    canvas = _Canvas()
    horizon = rng.randint(55, 85)
    _sky(canvas, rng)
    _ground(canvas, rng, horizon)
    _buildings(canvas, rng, horizon)
    _road(canvas, rng, horizon)
    for _ in range(rng.randint(1, 4)):
        _tree(canvas, rng, horizon)
    # Nearer figures are drawn later.
    figures = [_car] * rng.randint(1, 3) + [_person] * rng.randint(1, 4)
    for foot, figure in sorted((rng.randint(horizon + 20, HEIGHT - 4), i) for i in range(len(figures))):
        figures[figure](canvas, rng, foot, horizon)
    if rng.rand() < 0.5:
        _post(canvas, rng, horizon)
    return _light(canvas.image, rng), canvas.mask


def _colour(rng, hue, saturation, value):
    """An RGB colour from ranges. Hue is in turns."""
    h, s, v = (rng.uniform(*limits) for limits in (hue, saturation, value))
    return tuple(int(255 * c) for c in colorsys.hsv_to_rgb(h % 1.0, s, v))


def _sky(canvas, rng):
    top = np.array(_colour(rng, (0.5, 0.7), (0.1, 0.8), (0.6, 1.0)), float)
    bottom = top + (255 - top) * rng.uniform(0.2, 0.8)
    for y in range(HEIGHT):
        colour = tuple(int(c) for c in top + (bottom - top) * min(1.0, y / 80))
        canvas.rectangle((0, y, WIDTH, y), colour, SKY)
    for _ in range(rng.randint(0, 4)):
        x, y, w = rng.randint(0, WIDTH), rng.randint(0, 40), rng.randint(15, 50)
        canvas.ellipse((x, y, x + w, y + w // 3), tuple([rng.randint(200, 256)] * 3))


def _ground(canvas, rng, horizon):
    colour = _colour(rng, (0.2, 0.36), (0.4, 0.9), (0.3, 0.7))
    canvas.rectangle((0, horizon, WIDTH, HEIGHT), colour, GRASS)
    for _ in range(300):  # blades
        x, y = rng.randint(0, WIDTH), rng.randint(horizon, HEIGHT)
        shade = rng.uniform(0.6, 1.3)
        canvas.rectangle((x, y, x, y + 2), tuple(min(255, int(c * shade)) for c in colour))


def _buildings(canvas, rng, horizon):
    x = rng.randint(-30, 30)
    while x < WIDTH:
        width, height = rng.randint(22, 55), rng.randint(20, 60)
        if rng.rand() < 0.75:
            top = max(4, horizon - height)
            colour = _colour(rng, (0.0, 1.0), (0.05, 0.5), (0.3, 0.9))
            canvas.rectangle((x, top, x + width, horizon + 3), colour, BUILDING)
            pane = tuple(int(c * rng.uniform(0.25, 0.6)) for c in colour)
            for wx in range(x + 4, x + width - 4, 9):
                for wy in range(top + 4, horizon - 5, 10):
                    canvas.rectangle((wx, wy, wx + 4, wy + 5), pane)
        x += width + rng.randint(0, 14)


def _road(canvas, rng, horizon):
    centre, far = rng.randint(50, WIDTH - 50), rng.randint(5, 14)
    left, right = centre - rng.randint(60, 110), centre + rng.randint(60, 110)
    grey = rng.randint(60, 150)
    points = [(centre - far, horizon), (centre + far, horizon), (right, HEIGHT), (left, HEIGHT)]
    canvas.polygon(points, (grey, grey, grey + 5), ROAD)
    middle = (left + right) / 2
    for start in np.arange(0.1, 1.0, 0.22):  # the dashes of the middle line
        a, b = start**1.5, (start + 0.09) ** 1.5
        xa, xb = centre + (middle - centre) * a, centre + (middle - centre) * b
        ya, yb = horizon + (HEIGHT - horizon) * a, horizon + (HEIGHT - horizon) * b
        w = 1 + 3 * a
        canvas.polygon([(xa - w, ya), (xa + w, ya), (xb + w, yb), (xb - w, yb)], (225, 225, 215))


def _tree(canvas, rng, horizon):
    x, foot, size = rng.randint(5, WIDTH - 5), horizon + rng.randint(3, 25), rng.randint(16, 28)
    trunk = _colour(rng, (0.04, 0.1), (0.4, 0.7), (0.2, 0.45))
    canvas.rectangle((x - 2, foot - size, x + 2, foot), trunk, TREE)
    leaf = _colour(rng, (0.22, 0.42), (0.5, 1.0), (0.2, 0.55))
    for _ in range(9):
        dx, dy = rng.randint(-size // 2, size // 2 + 1), rng.randint(-size // 2, size // 2 + 1)
        r, shade = rng.randint(size // 3, size // 2 + 1), rng.uniform(0.7, 1.2)
        y = foot - int(1.3 * size)
        colour = tuple(min(255, int(c * shade)) for c in leaf)
        canvas.ellipse((x + dx - r, y + dy - r, x + dx + r, y + dy + r), colour, TREE)


def _car(canvas, rng, foot, horizon):
    scale = 0.5 + (foot - horizon) / (HEIGHT - horizon)
    w, h = int(34 * scale), int(11 * scale)
    x = rng.randint(0, WIDTH - w // 2)
    body = _colour(rng, (0.0, 1.0), (0.7, 1.0), (0.5, 1.0))
    glass = (40, 50, 60)
    roof = [(x + w * 0.18, foot - h), (x + w * 0.32, foot - 2 * h)]
    roof += [(x + w * 0.7, foot - 2 * h), (x + w * 0.85, foot - h)]
    canvas.polygon(roof, body, CAR)
    mx, my = x + w / 2, foot - 1.4 * h
    canvas.polygon([(0.8 * px + 0.2 * mx, 0.8 * py + 0.2 * my) for px, py in roof], glass)
    canvas.rectangle((x, foot - h, x + w, foot - h // 4), body, CAR)
    r = max(2, h // 3)
    for centre in (x + w * 0.22, x + w * 0.78):
        canvas.ellipse((centre - r, foot - 2 * r, centre + r, foot), (20, 20, 20), CAR)


def _person(canvas, rng, foot, horizon):
    h = int(34 * (0.55 + 0.8 * (foot - horizon) / (HEIGHT - horizon)))
    w = max(3, h // 6)
    x = rng.randint(6, WIDTH - 6)
    skin = _colour(rng, (0.03, 0.09), (0.3, 0.6), (0.4, 0.95))
    shirt = _colour(rng, (0.0, 1.0), (0.3, 1.0), (0.3, 1.0))
    legs = _colour(rng, (0.55, 0.7), (0.1, 0.6), (0.1, 0.5))
    canvas.rectangle((x - w, foot - h // 2, x - 1, foot), legs, PERSON)
    canvas.rectangle((x + 1, foot - h // 2, x + w, foot), legs, PERSON)
    canvas.rectangle((x - w, foot - int(0.85 * h), x + w, foot - h // 2), shirt, PERSON)
    canvas.ellipse((x - w, foot - int(1.1 * h), x + w, foot - int(0.82 * h)), skin, PERSON)


def _post(canvas, rng, horizon):
    """A street lamp. ADE20K has a class for lamps, but here a lamp is "other", so that label 0 occurs."""
    x = rng.randint(10, WIDTH - 10)
    canvas.rectangle((x, horizon - 40, x + 2, horizon + 20), (50, 50, 55), OTHER)
    canvas.ellipse((x - 4, horizon - 46, x + 6, horizon - 38), (250, 240, 190), OTHER)


def _light(image, rng):
    """Blur the image and add noise, then change brightness, contrast and colour of the whole image strongly."""
    pixels = np.asarray(image.filter(ImageFilter.GaussianBlur(0.5)), np.float64) / 255
    pixels = pixels + rng.normal(0, rng.uniform(0.01, 0.04), pixels.shape)
    gamma = np.exp(rng.uniform(-0.7, 0.7))
    gain = np.exp(rng.uniform(-0.9, 0.25)) * np.exp(rng.uniform(-0.35, 0.35, 3))
    haze = rng.uniform(0, 0.45) * rng.uniform(0.5, 1.0, 3)
    pixels = np.clip(pixels, 0, 1) ** gamma * gain
    pixels = pixels * (1 - haze) + haze
    return Image.fromarray((np.clip(pixels, 0, 1) * 255 + 0.5).astype(np.uint8))
