"""The project keeps its own rules: import directions, docstrings, documents that agree with the code."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import moe_jax
from moe_jax.cli import parse_run

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
LIBRARY = sorted((ROOT / "moe_jax").rglob("*.py"))
CONVERTERS = sorted((ROOT / "converters").rglob("*.py"))
# What the converters' core may use of the library; their commands may use all of it.
CORE_NEEDS = {"config", "errors", "source", "model"}
COMMANDS = {"__main__", "parity", "report"}


def imported_modules(path: Path) -> Iterator[str]:
    """The dotted names of all modules that a file imports, inside functions too; not those for type checkers only."""
    for node in _runtime_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from package import module` names a module in its second half.
            folder = ROOT / (node.module or "").replace(".", "/")
            names = [alias.name for alias in node.names]
            yield from (f"{node.module}.{name}" for name in names if (folder / f"{name}.py").is_file())
            if any(not (folder / f"{name}.py").is_file() for name in names):
                yield node.module or ""


def _runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _runtime_nodes(child)


def room_order() -> list[str]:
    """The rooms of docs/design.md from left to right; a folder's name ends with a slash."""
    text = (ROOT / "docs" / "design.md").read_text()
    (block,) = re.findall(r"```rooms\n(.*?)```", text, re.DOTALL)
    return block.replace("|", " ").split()


def room_of(module: str) -> str:
    """`config` for moe_jax.config, `moe/` for moe_jax.moe.router."""
    name = module.split(".")[1]
    return f"{name}/" if (ROOT / "moe_jax" / name).is_dir() else name


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_every_file_has_one_place_in_the_rooms() -> None:
    files = {room_of(dotted(path)) for path in LIBRARY if path != ROOT / "moe_jax" / "__init__.py"}
    assert sorted(room_order()) == sorted(files)


@pytest.mark.parametrize("path", LIBRARY, ids=dotted)
def test_a_room_imports_only_rooms_to_its_left(path: Path) -> None:
    if path == ROOT / "moe_jax" / "__init__.py":
        return
    order, own = room_order(), room_of(dotted(path))
    rooms = {room_of(name) for name in imported_modules(path) if name.startswith("moe_jax.")} - {own}
    assert [room for room in rooms if order.index(room) > order.index(own)] == []


def test_only_hf_reaches_back_to_the_converters() -> None:
    reaching = {
        path.stem for path in LIBRARY if any(name.split(".")[0] == "converters" for name in imported_modules(path))
    }
    assert reaching == {"hf"}


@pytest.mark.parametrize("path", [path for path in CONVERTERS if path.stem not in COMMANDS], ids=dotted)
def test_the_core_of_the_converters_needs_little_of_the_library(path: Path) -> None:
    used = {name for name in imported_modules(path) if name.split(".")[0] == "moe_jax"}
    assert used <= {f"moe_jax.{name}" for name in CORE_NEEDS}


@pytest.mark.parametrize("path", CONVERTERS, ids=dotted)
def test_the_core_of_the_converters_never_uses_their_commands(path: Path) -> None:
    used = {name for name in imported_modules(path) if name.startswith("converters.")}
    assert path.stem in COMMANDS or not used & {f"converters.{name}" for name in COMMANDS}


def test_torch_is_imported_only_inside_functions() -> None:
    for path in LIBRARY + CONVERTERS:
        top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not re.search(r"\b(torch|transformers)\b", "\n".join(map(ast.unparse, top))), path


@pytest.mark.parametrize("path", LIBRARY + CONVERTERS, ids=dotted)
def test_every_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("name", moe_jax.__all__)
def test_every_public_name_exists_and_has_a_docstring(name: str) -> None:
    value = getattr(moe_jax, name)
    documented = value if callable(value) else type(value)
    text = (documented.__doc__ or "").strip()
    assert text
    assert not text.startswith(f"{name}("), "a dataclass's generated docstring"


def python_blocks() -> list[tuple[str, str]]:
    return [
        (f"{path.name}:{number}", block)
        for path in DOCUMENTS
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
    ]


def test_python_in_the_documents_compiles_and_uses_public_names() -> None:
    for where, block in python_blocks():
        tree = ast.parse(block, where)
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "moe_jax"
        }
        assert used <= set(moe_jax.__all__), where


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_in_the_documents_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_example_runs_can_be_read(path: Path) -> None:
    run = parse_run([str(path)])
    assert run.config.train.steps > 0
    assert run.devices == 0


def test_the_changelog_starts_with_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == version
