"""Docstrings of the package are plain text; here they become the markup that Sphinx reads."""

import inspect
import re

import invfunc
from invfunc import errors, kronecker, layers, pairs

SECTION = re.compile(r"(Args|Returns|Raises|Example|Composes with|Cost|Source):(?: +(.*))?$")
ENTRY = re.compile(r" {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*): +(.*)")
LINKS = {name: f"invfunc.errors.{name}" for name, kind in vars(errors).items() if inspect.isclass(kind)}
LINKS |= {name: f"invfunc.{name}" for name in invfunc.__all__ if not inspect.ismodule(getattr(invfunc, name))}
LINKS |= {name: f"invfunc.pairs.{name}" for name in pairs.__all__}
LINKS |= {
    f"{m.__name__.partition('.')[2]}.{n}": f"{m.__name__}.{n}" for m in (kronecker, layers, pairs) for n in m.__all__
}
LINKS |= {name: f"invfunc.kronecker.{name}" for name in ("Kronecker", "LowRank", "kfoc", "kfra")}


def as_rst(app, what, name, obj, options, lines):
    """A handler of `autodoc-process-docstring`."""
    lines[:] = converted(lines)


def listed(app, name, source):
    """A handler of `source-read`: a block `{api}` of names becomes a table of them, and all that is said of each."""
    source[0] = re.sub(r"```\{api\} (\S+)\n(.*?)```", _entries, source[0], flags=re.DOTALL)


def _entries(match):
    module, names = match[1], match[2].split()
    table = "".join(f"   {name}\n" for name in names)
    each = "".join(f".. {_directive(module, name)}:: {module}.{name}\n\n" for name in names)
    return f"```{{eval-rst}}\n.. currentmodule:: {module}\n.. autosummary::\n   :nosignatures:\n\n{table}\n{each}```"


def _directive(module, name):
    thing = getattr(__import__(module, fromlist=[name]), name)
    if not isinstance(thing, type):
        return "autofunction"
    return "autoexception" if issubclass(thing, Exception) else "autoclass"


def converted(lines):
    """Sections become bold words, arguments lists, what stands further in literal blocks, and names links."""
    found, indent = [], 0
    for block in _blocks(lines):
        section = SECTION.fullmatch(block[0])
        if section:
            indent = 4 * (section[2] is None)
            body = [section[2], *(line.strip() for line in block[1:])] if section[2] else block[1:]
            found += _section(section[1], body)
        elif block[0].lstrip().startswith(">>>"):
            found += [line[indent:] for line in block]
        elif len(block[0]) - len(block[0].lstrip()) > indent:
            found += ["::", "", *("    " + line[indent:] for line in block)]
        else:
            indent = min(indent, len(block[0]) - len(block[0].lstrip()))
            found += _prose([line[indent:] for line in block])
        found.append("")
    return found


def _blocks(lines):
    block = []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line)
        elif block:
            yield block
            block = []


def _section(title, body):
    if title in ("Args", "Raises"):
        return [f"**{title}**", "", *_definitions(title, body)]
    if title == "Example":
        return [f"**{title}**", "", *(line[4:] for line in body)]
    if title == "Returns":
        return [f"**{title}**", "", *_prose([line[4:] for line in body])]
    return _prose([f"**{title}.** {body[0].strip()}", *(line.strip() for line in body[1:])])


def _definitions(title, body):
    """`name: text` in a list of what is explained; what has no name stands as it is."""
    entries = []
    for line in body:
        start = ENTRY.fullmatch(line)
        if start or not entries:
            entries.append((start[1] if start else "", [start[2] if start else line.strip()]))
        elif len(line) - len(line.lstrip()) == 4:
            entries.append(("", [line.strip()]))
        else:
            entries[-1][1].append(line.strip())
    found = []
    for names, text in entries:
        if names:
            terms = names.split(", ")
            found.append(", ".join(_inline(f"`{name}`") if title == "Raises" else f"``{name}``" for name in terms))
        found += ["    " * bool(names) + line for line in _prose(text)] + [""]
    return found


def _prose(lines):
    text = _inline("\n".join(lines))
    return re.sub(r"^([A-Za-z])\. ", r"\1\\. ", text).split("\n")  # a letter, and no list that is counted by letters


def _inline(text):
    parts = re.split(r"(`[^`]+`)", text)
    for i, part in enumerate(parts):
        if i % 2 == 0:
            bold = re.match(r"\*\*[\w ]+\.\*\*", part)
            head, rest = (bold[0], part[bold.end() :]) if bold else ("", part)
            parts[i] = head + re.sub(r"([*|\\]|_\b|\b_|_(?=\W|$))", r"\\\1", rest).replace("\n\\* ", "\n* ")
            if parts[i].startswith("\\* "):
                parts[i] = parts[i][1:]
        else:
            name = part[1:-1]
            parts[i] = f":py:obj:`{name} <{LINKS[name]}>`" if name in LINKS else f"`{part}`"
            parts[i] += "\\ " * bool(re.match(r"[\w\[(]", parts[i + 1]))
    return "".join(parts)
