"""The rules of the house, read from the source: who may import whom, how long things
are, what is documented."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from repository import ROOT

# Bottom up. A module imports from lower layers, or from its own package (kernels,
# sharding, checking, plan, examples).
LAYERS = (
    ("layout", "config", "eager", "pretend", "streams", "comm_log", "announcements"),
    ("holders",),
    ("kernels",),
    ("backends",),
    ("ops",),
    ("groups", "memory"),
    ("transport", "rules"),
    ("sharding",),
    ("checks", "model_checks", "options", "owners", "saved_groups"),
    ("build", "state", "observation", "user_edits"),
    ("checking",),
    ("sharded_optimizer",),
    ("optimizer", "amp"),
    ("__init__", "checkpoint", "plan", "integrations"),
    ("cli",),
    ("examples", "__main__"),
)
LAYER_OF = {name: index for index, layer in enumerate(LAYERS) for name in layer}

DISTRIBUTED_TYPES = {"ProcessGroup", "DeviceMesh"}
COMMUNICATORS = {
    "zerokern/transport.py": "collectives belong here",
    "zerokern/groups.py": "knows who is in a group, and compares descriptions",
    "zerokern/checking/plain.py": "averages in the plainest way",
    "zerokern/checking/session.py": "keeps the process group over the runs of a script",
    "zerokern/plan/rehearsal.py": "brings the fake process group",
    "zerokern/plan/script.py": "keeps a script from bringing a real one",
    "zerokern/plan/calibration.py": "starts ranks, to measure them",
}
KERNEL_IMPORTERS = {"zerokern/ops.py", "zerokern/backends.py"}
TORCHS_OWN = {"grad", "data", "__class__", "forward", "atexit"}
"""Attributes of torch's objects, and of Python's, that are there to be set."""
MARKS = {
    "of_param": "a ReducedGradient is made of a tensor that is there already",
    "_placeholders": "so is a PlaceholderParameter",
    "is_exception": "a rehearsal marks answers that nobody has computed",
    "__signature__": "Python looks for it on a class",
}
STRUCTURES = {"kernels/native.py": "fields of the structures that C reads"}
ENVIRONMENT_READERS = {
    "zerokern/config.py": "the one place for settings of zerokern",
    "zerokern/plan/script.py": "gives a script what torchrun would",
    "zerokern/plan/calibration.py": "what torchrun says of ranks and nodes",
    "kernels/launch.py": (
        "TRITON_INTERPRET, which decides at import how kernels are defined"
    ),
    "kernels/native.py": "XDG_CACHE_HOME; kernels cannot import config",
}
PRINTERS = ("zerokern/examples/", "zerokern/cli.py")
MOST_LINES_OF_FILE = 400
MOST_LINES_OF_FUNCTION = 60
CARD = ("Maths:", "Grid:", "Reads:", "Writes:", "Computes:", "Masks:", "Twin:")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _sources() -> list[str]:
    """Return every source file once, relative to the root: zerokern/kernels is a link
    to kernels."""
    package = (
        p
        for p in (ROOT / "zerokern").rglob("*.py")
        if "kernels" not in p.relative_to(ROOT).parts
    )
    return sorted(
        str(p.relative_to(ROOT)) for p in [*package, *(ROOT / "kernels").rglob("*.py")]
    )


SOURCES = _sources()
each_source = pytest.mark.parametrize("source", SOURCES)


@cache
def _tree(source: str) -> ast.Module:
    return ast.parse((ROOT / source).read_text())


def _module(source: str) -> tuple[str, ...]:
    """Return the name that a file has inside zerokern: zerokern/stages/zero1.py is
    ("stages", "zero1")."""
    parts = Path(source).with_suffix("").parts
    return parts if parts[0] == "kernels" else parts[1:]


def _imports(source: str) -> Iterator[tuple[str, str | None]]:
    """Yield (absolute module, name) of every import statement; name is None for `import
    module`."""
    package = ("zerokern", *_module(source)[:-1])
    for node in ast.walk(_tree(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            )
            module = ".".join(part for part in (base, node.module) if part)
            yield from ((module, alias.name) for alias in node.names)


def _inside(source: str) -> Iterator[tuple[str, ...]]:
    """Yield what a file imports of zerokern, as `_module` names it; ("__init__",) is
    the root."""
    for module, name in _imports(source):
        first, *rest = module.split(".")
        if first == "zerokern":
            if rest:
                yield tuple(rest)
            elif name in LAYER_OF:
                yield (name,)
            else:
                yield ("__init__",)


def _functions(source: str) -> list[Function]:
    return [node for node in ast.walk(_tree(source)) if isinstance(node, Function)]


def _calls(node: ast.AST, name: str) -> bool:
    return any(
        isinstance(n, ast.Call) and ast.unparse(n.func) == name for n in ast.walk(node)
    )


def _is_jit(function: Function) -> bool:
    return any(
        "triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list
    )


def test_every_module_has_a_layer() -> None:
    homeless = sorted({_module(source)[0] for source in SOURCES} - set(LAYER_OF))
    assert not homeless, f"{homeless}: give each a place in LAYERS"


@each_source
def test_imports_point_down(source: str) -> None:
    ours = _module(source)
    for theirs in _inside(source):
        same_package = len(ours) > 1 and theirs[0] == ours[0]
        allowed = same_package or LAYER_OF[theirs[0]] < LAYER_OF[ours[0]]
        assert allowed, (
            f"{source} imports zerokern.{'.'.join(theirs)}, which is not below it"
        )


def test_only_ops_imports_kernels() -> None:
    importers = [
        s
        for s in SOURCES
        if not s.startswith("kernels/")
        for m in _inside(s)
        if m[0] == "kernels"
    ]
    assert set(importers) <= KERNEL_IMPORTERS


def test_kernels_import_torch_and_triton_alone() -> None:
    for source in (s for s in SOURCES if s.startswith("kernels/")):
        assert {m[0] for m in _inside(source)} <= {"kernels"}, source


def test_kernels_is_no_package_of_its_own() -> None:
    # An installed top-level `kernels` would shadow the PyPI package of that name, which
    # transformers imports.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "zerokern" / "kernels").resolve() == ROOT / "kernels"


def test_layout_is_pure_arithmetic() -> None:
    modules = {module.split(".")[0] for module, _ in _imports("zerokern/layout.py")}
    assert not modules & {"torch", "zerokern", "triton", "numpy"}


@each_source
def test_only_comm_communicates(source: str) -> None:
    if source in COMMUNICATORS or source.startswith("zerokern/examples/"):
        return
    names = {
        n or m
        for m, n in _imports(source)
        if m.startswith("torch.distributed") or (m, n) == ("torch", "distributed")
    }
    assert names <= DISTRIBUTED_TYPES, (
        f"{source} imports {names - DISTRIBUTED_TYPES}: collectives belong in comm.py"
    )
    assert "torch.distributed." not in "\n".join(
        ast.unparse(node)
        for node in ast.walk(_tree(source))
        if isinstance(node, ast.Call)
    )


def test_no_import_cycle() -> None:
    """Not even for types: who is imported under TYPE_CHECKING counts."""
    modules = {_module(source): source for source in SOURCES}
    graph: dict[str, set[str]] = {source: set() for source in SOURCES}
    for source in SOURCES:
        for module, name in _imports(source):
            parts = tuple(module.split(".")[1:])
            if module.split(".")[0] == "zerokern":
                for target in (parts, (*parts, name or "")):
                    if target in modules:
                        graph[source].add(modules[target])
    while leaves := [source for source, needs in graph.items() if not needs]:
        for leaf in leaves:
            del graph[leaf]
        for needs in graph.values():
            needs.difference_update(leaves)
    assert not graph, f"imports run in circles among {sorted(graph)}"


@each_source
def test_attributes_are_written_by_their_class_alone(source: str) -> None:
    for node in ast.walk(_tree(source)):
        if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load):
            continue
        own = isinstance(node.value, ast.Name) and node.value.id == "self"
        named = node.attr in TORCHS_OWN or node.attr in MARKS or source in STRUCTURES
        assert own or named, f"{source}:{node.lineno} sets {ast.unparse(node)}"


@each_source
def test_environment_is_read_in_one_place(source: str) -> None:
    reads = any(
        isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("os.environ", "os.getenv")
        for node in ast.walk(_tree(source))
    )
    assert not reads or source in ENVIRONMENT_READERS


@each_source
def test_library_prints_nothing(source: str) -> None:
    assert source.startswith(PRINTERS) or not _calls(_tree(source), "print")


@each_source
def test_lengths(source: str) -> None:
    lines = len((ROOT / source).read_text().splitlines())
    assert lines <= MOST_LINES_OF_FILE, f"{source} has {lines} lines: split it by noun"
    for function in _functions(source):
        docstring = function.body[0] if ast.get_docstring(function) else None
        documentation = (
            (docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0
        )
        lines = (function.end_lineno or 0) - function.lineno + 1 - documentation
        assert lines <= MOST_LINES_OF_FUNCTION, (
            f"{source}: {function.name} has {lines} lines: split it"
        )


@each_source
def test_public_names_are_documented(source: str) -> None:
    tree = _tree(source)
    classes = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    bodies = [tree.body, *(node.body for node in classes)]
    functions = [
        n
        for body in bodies
        for n in body
        if isinstance(n, Function) and not n.name.startswith("_")
    ]
    missing = [
        node.name for node in [*classes, *functions] if not ast.get_docstring(node)
    ]
    assert ast.get_docstring(tree), f"{source} has no docstring"
    assert not missing, f"{source}: {missing} have no docstring"


@pytest.mark.parametrize("source", [s for s in SOURCES if s.startswith("kernels/")])
def test_kernel_cards(source: str) -> None:
    for function in filter(_is_jit, _functions(source)):
        docstring = ast.get_docstring(function) or ""
        assert docstring, f"{source}: {function.name} has no docstring"
        if function.name.endswith("_kernel") or _calls(function, "tl.program_id"):
            missing = [entry for entry in CARD if entry not in docstring]
            assert not missing, f"{source}: the card of {function.name} lacks {missing}"


# ------------------------------------------------------------------------ density

MOST_TOKENS_PER_LINE = {"zerokern": 7.5, "kernels": 8.5, "tests": 9.0}
"""Of lines with code, in each folder as a whole. FSDP2 of torch 2.13 has 5.9."""
NO_CODE = (
    *(tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENDMARKER, tokenize.COMMENT),
)


def _tokens_per_line(path: Path) -> tuple[int, int]:
    """Return how many tokens a file has, docstrings and comments apart, and on how many
    lines."""
    text = path.read_text()
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            documentation |= set(range(node.lineno, (node.end_lineno or 0) + 1))  # type: ignore[attr-defined]
    lines = [
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in NO_CODE and token.start[0] not in documentation
    ]
    return len(lines), len(set(lines))


@pytest.mark.parametrize("folder", MOST_TOKENS_PER_LINE)
def test_density(folder: str) -> None:
    measured = [_tokens_per_line(path) for path in (ROOT / folder).rglob("*.py")]
    tokens, lines = (sum(counts) for counts in zip(*measured, strict=True))
    most = MOST_TOKENS_PER_LINE[folder]
    assert tokens <= most * lines, f"{folder}: {tokens / lines:.2f} tokens per line"
