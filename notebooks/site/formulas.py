"""Formulas become MathML when the site is built: browsers draw it, and nothing is loaded from elsewhere."""

import re

from docutils.nodes import SkipNode
from latex2mathml.converter import convert


def _mathml(node, display):
    tex = re.sub(
        r"\\[bB]igg?[lr]?(?=\\)", "", node.astext()
    )  # the size of a bracket that has a name is not known there
    return convert(tex, display=display)


def inline(translator, node):
    translator.body.append(_mathml(node, "inline"))
    raise SkipNode


def displayed(translator, node):
    translator.body.append(f'<div class="formula">{_mathml(node, "block")}</div>')
    raise SkipNode
