"""The command line: ``gr demo | data | ids | train | evaluate | recommend | rank``.

Exit codes: 0 done, 1 a defect or an interruption, 2 input that was refused (the message says which
and why).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

# Everything heavy is imported inside the commands: `gr --help` answers at once.

app = typer.Typer(
    name="gr",
    help="A generative recommender: items become semantic IDs, a decoder retrieves and ranks.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
ids_app = typer.Typer(
    help="Semantic IDs: build them, and see how good they are.", no_args_is_help=True
)
app.add_typer(ids_app, name="ids")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Data = Annotated[
    str,
    typer.Option("--data", "-d", help="A data set by name (see `gr data`), or a file of events."),
]
Columns = Annotated[
    str | None,
    typer.Option(
        help="Names of the file's columns, where they differ from user_id, item_id, timestamp (or "
        "order), action, value, scenario: user_id=uid,item_id=movie. And title=, in --items."
    ),
]
Items = Annotated[Path | None, typer.Option(help="File of item metadata, beside a file of events.")]
RecipeOption = Annotated[
    str, typer.Option("--recipe", "-r", help="A preset (see `gr recipe`), or a JSON file.")
]
Model = Annotated[Path, typer.Argument(help="Folder of a saved recommender, e.g. runs/demo/model.")]
History = Annotated[
    str | None,
    typer.Option(
        help="Item ids, oldest first, separated by commas; an action after a colon: 50:like,181."
    ),
]


def main() -> None:
    """Entry point of the command ``gr``."""
    app()


@contextmanager
def _refusals() -> Iterator[None]:
    """Refused input is one red line and exit code 2, not a traceback."""
    from rich.markup import escape

    from gr.console import ERR

    try:
        yield
    except (ValueError, KeyError, FileNotFoundError, FileExistsError, NotADirectoryError) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        ERR.print(f"[red]error:[/red] {escape(str(text))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")] = Path(
        "runs/demo"
    ),
    json: Json = False,
) -> None:
    """Train, evaluate and try a recommender on MovieLens 100K, in a few minutes on two cores."""
    from gr.console import ERR, OUT, example_table, metrics_table, print_json, retrieval_table
    from gr.demo import run_demo

    def say(line: str) -> None:
        ERR.print(f"[bold]gr demo[/bold] {line}")

    with _refusals():
        result = run_demo(output, say=say, progress=sys.stderr.isatty())
    if json:
        print_json(result.metrics)
        return
    OUT.print(retrieval_table(result.metrics["retrieval"]))
    OUT.print(metrics_table("Ranking: p(like) of held-out events", result.ranking.to_dict()))
    for example in result.examples:
        OUT.print(example_table(example))
    OUT.print(f"{result.split_summary}")
    OUT.print(f"{result.facts['training time']}; {result.metrics['seconds']:.0f} s in all")
    OUT.print(f"[bold]{result.folder}[/bold]: model/, metrics.json, report.html")


@app.command()
def data(
    name: Annotated[
        str | None,
        typer.Argument(help="A data set by name, or a file; none lists names."),
    ] = None,
    columns: Columns = None,
    items: Items = None,
    json: Json = False,
) -> None:
    """What a data set holds, and what had to be repaired; without a name, the names there are."""
    from gr.console import OUT, fields_table, print_json
    from gr.data import DATASETS, GENERATED, build_sequences, leave_one_out
    from gr.training.prepare import parse_columns, read_data

    if name is None:
        found = {
            key: "downloaded on first use" if e.sources else "$GR_DATA"
            for key, e in DATASETS.items()
        }
        found |= dict.fromkeys(GENERATED, "made from a seed")
        if json:
            print_json(found)
        else:
            OUT.print(fields_table("Data sets, and where they come from", found))
        return
    with _refusals():
        interactions = read_data(name, parse_columns(columns), items)
        summary: dict[str, Any] = dict(interactions.summary())
        split = leave_one_out(build_sequences(interactions), short_users="train")
        summary["leave-one-out split_hash"] = split.split_hash
    if json:
        print_json(summary)
    else:
        OUT.print(fields_table(name, summary))


@app.command()
def recipe(
    name: Annotated[str | None, typer.Argument(help="A preset; none lists them.")] = None,
) -> None:
    """Print a preset as JSON, to keep or to change: `gr recipe hstu-sid > mine.json`."""
    from gr.console import OUT, fields_table, print_json
    from gr.training.presets import DESCRIPTIONS, find_recipe

    if name is None:
        OUT.print(fields_table("Presets", DESCRIPTIONS))
        return
    with _refusals():
        print_json(find_recipe(name).to_dict())


@ids_app.command("build")
def ids_build(
    data: Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")],
    recipe: RecipeOption = "hstu-sid",
    columns: Columns = None,
    items: Items = None,
    json: Json = False,
) -> None:
    """Give every item of a data set a semantic ID: catalogue and tokenizer."""
    from gr.console import OUT, fields_table, print_json
    from gr.tokenizer import catalog_report
    from gr.training.ids import build_ids
    from gr.training.prepare import parse_columns, prepare, read_data
    from gr.training.presets import find_recipe

    with _refusals():
        chosen = find_recipe(recipe)
        interactions = read_data(data, parse_columns(columns), items)
        ids = build_ids(prepare(interactions, chosen.data), chosen.ids)
        ids.save(output)
        report = catalog_report(
            ids.catalog, embeddings=ids.embeddings, quantizer=ids.quantizer
        ).to_dict()
    if json:
        print_json(report)
    else:
        OUT.print(fields_table(f"{output}: {len(ids.catalog):,} items", report))


@ids_app.command("report")
def ids_report(
    folder: Annotated[Path, typer.Argument(help="Folder with a catalogue.")],
    plots: Annotated[Path | None, typer.Option(help="Folder for the figures.")] = None,
    json: Json = False,
) -> None:
    """Collisions, code usage and perplexity of the semantic IDs in a folder."""
    from gr.console import OUT, fields_table, print_json
    from gr.tokenizer import Catalog, catalog_report

    with _refusals():
        report = catalog_report(Catalog.load(folder))
        if plots is not None:
            report.plot(plots)
    if json:
        print_json(report.to_dict())
    else:
        OUT.print(fields_table(str(folder), report.to_dict()))


@app.command()
def train(
    data: Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")],
    recipe: RecipeOption = "hstu-sid",
    columns: Columns = None,
    items: Items = None,
    resume: Annotated[bool, typer.Option(help="Go on from the latest checkpoint.")] = False,
    json: Json = False,
) -> None:
    """Train a recommender. On several GPUs or machines: accelerate launch -m gr.training.train."""
    from gr.console import OUT, fields_table, print_json
    from gr.training.prepare import parse_columns, read_data
    from gr.training.presets import find_recipe
    from gr.training.train import train as run_training

    with _refusals():
        chosen = find_recipe(recipe)
        interactions = read_data(data, parse_columns(columns), items)
        run = run_training(
            interactions, chosen, output, resume=resume, progress=sys.stderr.isatty()
        )
    best = max(run.trainer.validations, key=lambda v: v[chosen.training.selection.metric])
    result = {"model": str(run.folder / "model"), "split": run.data.split.summary(), **best}
    if json:
        print_json(result)
    else:
        OUT.print(fields_table("Best validation", result))


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a training run (it holds recipe.json).")],
    data: Data,
    columns: Columns = None,
    items: Items = None,
    part: Annotated[str, typer.Option(help="test or validation")] = "test",
    beams: Annotated[
        int | None, typer.Option(help="Retrieve with that many beams; none scores every item.")
    ] = None,
    bare: Annotated[
        bool, typer.Option(help="Ask with item ids alone, without actions and times.")
    ] = False,
    json: Json = False,
) -> None:
    """Retrieval metrics of a trained recommender beside three baselines, on the same split."""
    from gr.console import OUT, difference_line, print_json, retrieval_table
    from gr.eval import evaluate_recommender, paired_difference
    from gr.eval.baselines import evaluate_baselines
    from gr.inference import Recommender
    from gr.training.prepare import parse_columns, prepare, read_data
    from gr.training.recipe import Recipe

    with _refusals():
        if part not in ("test", "validation"):
            raise ValueError(f"--part: {part!r}, wanted 'test' or 'validation'")
        interactions = read_data(data, parse_columns(columns), items)
        prepared = prepare(interactions, Recipe.load(run / "recipe.json").data)
        recommender = Recommender.from_pretrained(run / "model")
        rows = getattr(prepared.split, part)
        results = evaluate_baselines(prepared.split.train, rows, recommender.catalog)
        results[run.name] = evaluate_recommender(
            recommender, rows, prepared.has_clock, num_beams=beams, bare=bare
        )
        ahead = {
            metric: paired_difference(results[run.name], results["recency-knn"], metric)
            for metric in ("HR@10", "NDCG@10")
        }
    metrics = {name: result.to_dict() for name, result in results.items()}
    if json:
        print_json(
            {
                "split_hash": prepared.split.split_hash,
                "retrieval": metrics,
                "minus_recency_knn": ahead,
            }
        )
    else:
        OUT.print(retrieval_table(metrics))
        for metric, difference in ahead.items():
            OUT.print(difference_line(run.name, "recency-knn", metric, difference))
        OUT.print(prepared.split.summary())


@app.command()
def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="A study by name, or a JSON file; none lists names.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder to write; runs/reproduce/NAME by default."),
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="Also write the result here, as NAME.json.")
    ] = None,
    json: Json = False,
) -> None:
    """Run what a published number stands for, beside that number. A cut run goes on."""
    from gr.console import ERR, OUT, fields_table, print_json, retrieval_table
    from gr.reproduce import find_study, study_names
    from gr.reproduce import reproduce as run_study
    from gr.reproduce.results import save_result

    with _refusals():
        if name is None:
            studies = [find_study(found) for found in study_names()]
            titles = {s.name: f"{s.title} ({s.data}, about {s.minutes} min)" for s in studies}
            if json:
                print_json(titles)
            else:
                OUT.print(fields_table("Studies", titles))
            return
        study = find_study(name)
        folder = output or Path("runs/reproduce") / study.name
        result = run_study(
            study,
            folder,
            say=lambda line: ERR.print(f"[bold]gr reproduce[/bold] {line}"),
            progress=sys.stderr.isatty(),
        )
        places = [folder / "result.json"]
        if results is not None:
            places.append(results / f"{study.name}.json")
        for place in places:
            save_result(result, place)
    if json:
        print_json(result)
        return
    for protocol, baselines in result["baselines"].items():
        ours = {run: values["test"][protocol] for run, values in result["runs"].items()}
        OUT.print(f"{study.title}: {protocol}")
        OUT.print(retrieval_table({**baselines, **ours}))
    for published in study.published:
        OUT.print(f"published: {published.system} {published.metrics} ({published.source})")


@app.command()
def results(
    folder: Annotated[Path, typer.Argument(help="Folder of results.")] = Path("docs/results"),
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the page here.")
    ] = None,
) -> None:
    """The page of all results, as Markdown."""
    from gr.data.whole_file import whole_file
    from gr.reproduce import load_results, results_page

    with _refusals():
        page = results_page(load_results(folder))
        if output is None:
            print(page, end="")
            return
        with whole_file(output) as temporary:
            temporary.write_text(page, encoding="utf-8")


@app.command()
def recommend(
    model: Model,
    history: History = None,
    k: Annotated[int, typer.Option("-k", help="How many items.")] = 10,
    action: Annotated[
        str | None, typer.Option(help="The action that counts beside the item.")
    ] = None,
    retrieve_only: Annotated[
        bool, typer.Option(help="By p(item) alone, without the action.")
    ] = False,
    json: Json = False,
) -> None:
    """Items for a history. Without one: what a user nobody knows is shown."""

    def ask(recommender: Any, events: list[Any]) -> Any:
        if retrieve_only:
            return recommender.retrieve([events], k=k)
        return recommender.recommend([events], k=k, action=action)

    _answer(model, history, json, ask)


@app.command()
def rank(
    model: Model,
    candidates: Annotated[str, typer.Option(help="Item ids to rank, separated by commas.")],
    history: History = None,
    action: Annotated[str | None, typer.Option(help="The action whose probability counts.")] = None,
    json: Json = False,
) -> None:
    """Order candidates by the probability of an action after a history."""
    wanted = [item.strip() for item in candidates.split(",") if item.strip()]
    _answer(model, history, json, lambda rec, events: rec.rank([events], [wanted], action))


def _answer(
    folder: Path, history: str | None, json: bool, ask: Callable[[Any, list[Any]], Any]
) -> None:
    from rich.markup import escape
    from rich.table import Table

    from gr.console import ERR, OUT, print_json
    from gr.inference import Recommender

    with _refusals(), warnings.catch_warnings(record=True) as skipped:
        recommender = Recommender.from_pretrained(folder)
        answer = ask(recommender, _events(history))[0]
    for warning in skipped:
        ERR.print(f"[yellow]{escape(str(warning.message))}[/yellow]", highlight=False)
    catalog = recommender.catalog
    if json:
        print_json(
            [
                {"item_id": s.item_id, "title": catalog.title(s.item_id), "score": s.score}
                for s in answer
            ]
        )
        return
    table = Table()
    for name in ("item", "title", "score"):
        table.add_column(name, justify="right" if name == "score" else "left")
    for scored in answer:
        item, title = escape(scored.item_id), escape(catalog.title(scored.item_id))
        table.add_row(item, title, f"{scored.score:.4f}")
    OUT.print(table)


def _events(history: str | None) -> list[Any]:
    from gr.data import Event

    events = []
    for entry in (history or "").split(","):
        item, _, action = entry.strip().partition(":")
        if item:
            events.append(Event(item, action or None))
    return events


if __name__ == "__main__":
    main()
