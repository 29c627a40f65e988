"""The pictures of `how.md`, drawn when the site is built, in the colours of its theme: light or dark."""

from docutils import nodes
from docutils.parsers.rst import Directive

FLOORS = [
    (["testing", "certified", "__main__"], "laws, plain loops, what hypothesis draws; the tour"),
    (["layers", "laplace"], "invertible layers; backends for the Laplace library"),
    (["invertible"], "blocks without memory, chains, fixed points"),
    (["blocks"], "a call of a block once more, and all that makes it the same"),
    (["chunks", "data_sets", "plans"], "many batches, many processes, plans"),
    (["statistics", "products", "pairs"], "one public transform a file"),
    (["transform", "statistic", "around", "functional"], "what all transforms share"),
    (["evaluation"], "a call: its parts, its batches, its processes"),
    (["core"], "the core: one run, one pullback, a contraction of each parameter"),
    (["structure"], "which outputs depend on what, which columns share a pass, in the core"),
    (["budget"], "what a call takes of memory and time"),
    (["reductions"], "what a statistic keeps, and how it adds up"),
    (["loss"], "square roots of losses, and columns that are drawn"),
    (["problem"], "the arguments of a call, sorted"),
    (["operations"], "forms of torch's operations with right second derivatives, and their names"),
    (["kronecker"], "Kronecker products"),
    (["linear_algebra"], "contractions and matrices"),
    (["tree", "errors", "_torch", "plan"], "pytrees, errors, the door to private torch, how work is divided"),
    (["thresholds"], "every number at which another way is taken"),
]
"""From the top: what a floor imports lies below it. `tests/test_site.py` compares them with those that are checked."""


def _text(x, y, words, kind="", anchor="middle"):
    words = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{kind}">{words}</text>'


def _box(x, y, width, height, words, kind="box"):
    """A box around its middle (x, y), with lines of words."""
    left, top = x - width / 2, y - height / 2
    shape = f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="5" class="{kind}"/>'
    lines = words.split("\n")
    first = y + 4.5 - 8 * (len(lines) - 1)
    return shape + "".join(_text(x, first + 16 * i, line) for i, line in enumerate(lines))


def _arrow(x1, y1, x2, y2, kind="forth"):
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="{kind}" marker-end="url(#{kind})"/>'


def _svg(width, height, title, *parts):
    ends = "".join(
        f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" class="{kind} end"/></marker>'
        for kind in ("forth", "back")
    )
    shape = f'viewBox="0 0 {width} {height}" style="max-width: {width}px"'
    return f'<svg class="picture" {shape} role="img"><title>{title}</title><defs>{ends}</defs>{"".join(parts)}</svg>'


def call():
    """What `diag_ggn(f, loss)(params, x, y)` does."""
    parts = [_text(0, 20, "1. f runs once, on the whole batch", "head", "start")]
    row, layers = 60, {200: "w1", 440: "w2"}
    steps = [(40, 60, "x"), (200, 110, "linear\nreads w1"), (320, 70, "tanh"), (440, 110, "linear\nreads w2")]
    steps += [(570, 80, "z [N, C]"), (690, 90, "loss(z, y)")]
    for (x, width, words), following in zip(steps, [*steps[1:], None], strict=True):
        parts.append(_box(x, row, width, 44, words, "box strong" if "reads" in words else "box"))
        if following:
            parts.append(_arrow(x + width / 2 + 2, row, following[0] - following[1] / 2 - 3, row))
    parts.append(_text(452, 122, "2. columns go back, all at once", "head", "start"))
    parts += [f'<path d="M690,86 L690,150 L{x},150" class="back"/>' for x in layers]
    for x, w in layers.items():
        parts += [_arrow(x, 150, x, 178, "back"), f'<line x1="{x - 40}" y1="84" x2="{x - 40}" y2="178" class="forth"/>']
        parts.append(_box(x, 202, 170, 44, "a [N, in]: what it read\ns [V, N, out]: what came"))
        parts += [_arrow(x, 226, x, 258), _box(x, 280, 190, 40, "einsum('vno,ni->oi', s², a²)", "box strong code")]
        parts += [_arrow(x, 302, x, 330), _text(x, 350, f'result["{w}"]  [out, in]', "code")]
    parts.append(_text(690, 200, "3. each statistic", "head"))
    parts.append(_text(690, 220, "is a contraction"))
    parts.append(_text(690, 238, "of a and s; no"))
    parts.append(_text(690, 256, "[N, out, in] is made"))
    return _svg(760, 365, "One call of diag_ggn", *parts)


def floors():
    parts = []
    for i, (names, words) in enumerate(FLOORS):
        y = 18 + 32 * i
        parts.append(_box(185, y, 366, 26, "", "box"))
        parts += [_text(185, y + 4.5, "   ".join(names), "code"), _text(382, y + 4.5, words, "", "start")]
    parts.append(_text(185, 32 * len(FLOORS) + 18, "imports go down", "head"))
    return _svg(800, 32 * len(FLOORS) + 26, "The floors of the package", *parts)


def chain():
    """Which states are in memory while a chain of three blocks runs forth and back."""
    rows = [
        ("forward, block 1", {1: "full"}, [(0, 1, "forth")]),
        ("forward, block 2", {2: "full"}, [(1, 2, "forth")]),
        ("forward, block 3", {3: "full"}, [(2, 3, "forth")]),
        ("backward, block 3", {3: "full", 2: "again"}, [(3, 2, "back")]),
        ("backward, block 2", {2: "again", 1: "again"}, [(2, 1, "back")]),
        ("backward, block 1", {1: "again", 0: "again"}, [(1, 0, "back")]),
    ]
    places = [250, 390, 530, 670]
    parts = [_text(x, 20, name, "code") for x, name in zip(places, ["x", "y1", "y2", "y3"], strict=True)]
    for i, (words, states, arrows) in enumerate(rows):
        y = 52 + 44 * i
        parts.append(_text(0, y + 5, words, "", "start"))
        for k, x in enumerate(places):
            parts.append(f'<circle cx="{x}" cy="{y}" r="11" class="state {states.get(k, "gone")}"/>')
        for start, end, kind in arrows:
            sign = 1 if end > start else -1
            parts.append(_arrow(places[start] + 15 * sign, y, places[end] - 16 * sign, y, kind))
            middle = (places[start] + places[end]) / 2
            parts.append(_text(middle, y - 7, f"f{end}" if sign > 0 else f"f{start} inverse", "small"))
    y = 52 + 44 * len(rows)
    for x, kind, words in ((250, "full", "in memory"), (400, "again", "computed again"), (590, "gone", "freed")):
        parts += [f'<circle cx="{x}" cy="{y}" r="8" class="state {kind}"/>', _text(x + 16, y + 5, words, "", "start")]
    return _svg(720, y + 20, "A chain of invertible blocks", *parts)


class Picture(Directive):
    """`picture` and its name: one of the functions above."""

    required_arguments = 1

    def run(self):
        drawn = {"call": call, "floors": floors, "chain": chain}[self.arguments[0]]()
        return [nodes.raw("", f'<div class="picture">{drawn}</div>', format="html")]
