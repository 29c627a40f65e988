"""Public docstrings and messages say it in the field's words: none of those that only this library knew."""

import ast
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

import invfunc
from invfunc import kronecker, layers, pairs, testing

DROPPED = {
    "per-sample gradient": r"\b(the|its|their|each|every|whose|of|no|squared|a|plain) shares?\b|\w's shares?\b",
    "tensor, parameter": r"\bleaf\b|\b(with|the|all|of|whose|are|has) leaves\b",
    "backward pass": r"(?<!forward )(?<!backward )\bpasses\b|\b(a|one|each|the|single|per|this) pass\b(?!-)",
    "runs f without saving memory": r"\b(takes?|taken) \w+ as (it is|they are)\b|\bas (it is|they are)(?=[.;:]|$)",
    "automatically, alone, on its own": r"\bby (itself|themselves)\b",
    "part": r"\bcrafts?\b",
    "has to be, will be": r"\b(is|are) to be\b",
}
EXPLAINED = r"vectors?\b|pulled back|\(rows of|see `|as in `(diag_ggn|kfac)`|[Rr]ows|dependent columns"
"""Phrases that a docstring with columns needs one of: they explain columns, or name the page that does."""
ROOT = Path(invfunc.__file__).parent


def _documented():
    for module in (invfunc, layers, kronecker, pairs, testing):
        yield module.__name__, module
        for name in module.__all__:
            value = getattr(module, name)
            yield f"{module.__name__}.{name}", value
            if inspect.isclass(value):
                yield from ((f"{name}.{own}", x) for own, x in vars(value).items() if not own.startswith("_"))


DOCSTRINGS = {name: inspect.cleandoc(doc) for name, x in _documented() if isinstance(doc := x.__doc__, str)}


def _strings(path):
    """The strings of a file that are no docstrings, each as one text; what stands in braces is left out."""
    tree = ast.parse(path.read_text())
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    within = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone | within:
            yield node.lineno, node.value


def dropped(text):
    """The words in a text that have another one, with that."""
    plain = re.sub(r"\s+", " ", re.sub(r"`[^`]*`", "`code`", text))
    return {match[0]: better for better, pattern in DROPPED.items() if (match := re.search(pattern, plain))}


@pytest.mark.parametrize("name", DOCSTRINGS)
def test_docstrings(name):
    found = dropped(DOCSTRINGS[name])
    if name == "invfunc.certified":  # a share of the entries, which is its option
        found = {word: better for word, better in found.items() if "share" not in word}
    assert not found


def test_columns_are_explained_where_they_are_met():
    met = {name: doc for name, doc in DOCSTRINGS.items() if re.search(r"\bcolumns?\b", doc)}
    assert len(met) > 5 and not [name for name, doc in met.items() if not re.search(EXPLAINED, doc)]


def test_messages():
    texts = [(path, line, text) for path in ROOT.rglob("*.py") for line, text in _strings(path) if text.count(" ") > 1]
    assert len(texts) > 1000
    assert not [(path.name, line, found) for path, line, text in texts if (found := dropped(text))]


@pytest.mark.parametrize("text", ["the share of each", "has a leaf w", "in 4 passes", "takes f as it is", "by itself"])
def test_old_words_are_noticed(text):
    assert dropped(text)


@pytest.mark.parametrize("text", ["samples share it", "two backward passes", "f leaves them", "it is a pass-through"])
def test_other_meanings_are_not(text):
    assert not dropped(text)


FILES = [ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))]


def test_docstrings_begin_with_a_noun_or_a_verb():
    files = [*FILES, *(ast.parse(path.read_text()) for path in Path(__file__).parent.rglob("*.py"))]
    alone = [node.value for file in files for node in ast.walk(file) if isinstance(node, ast.Expr)]
    texts = [node.value.strip() for node in alone if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    begun = re.compile(r"(What|Whether|Those|That|How|Where|Which|Who|When|Why)\b")
    assert len(texts) > 2000 and not [text for text in texts if begun.match(text)]


def test_a_class_has_its_name_alone():
    names = Counter(node.name for file in FILES for node in ast.walk(file) if isinstance(node, ast.ClassDef))
    assert len(names) > 300 and not [name for name, times in names.items() if times > 1]
