"""Scores of an evaluation: what each metric is, its standard error, two models' differences, and the files
and tables that show them.

    accuracy(samples, n)                  # metric -> its value for each problem
    summary(…), differences(…)            # values with standard errors, by set
    save_results(…), score_table(…)       # scores.json, lm_eval.json, samples.jsonl; lines of 80 columns
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from configs import Config
from data import Problems, Sample, fingerprint, group_by_prompt

Scores = dict[str, dict[str, list[float]]]  # set -> metric -> its value for each problem


# --- metrics of problems


def accuracy(samples: Sequence[Sample], n: int) -> dict[str, list[float]]:
    """Values of each evaluation metric, one for each problem, over its `n` samples.

    avg@n is the mean reward of n samples. pass@k is unbiased, for k = 2, 4, … n. maj@n grades the answer that
    most samples gave. response_len is in tokens."""
    groups = group_by_prompt(samples)
    right = [sum(s.reward > 0 for s in group) for group in groups]
    metrics = {f"avg@{n}": [sum(s.reward for s in group) / n for group in groups]}
    for k in sorted({2**i for i in range(1, n.bit_length())} | {n} - {1}):
        metrics[f"pass@{k}"] = [pass_at(k, n, c) for c in right]
    if n > 2:
        metrics[f"maj@{n}"] = [majority(group) for group in groups]
    metrics["response_len"] = [sum(len(s.ids) for s in group) / n for group in groups]
    metrics["truncated"] = [sum(not s.stopped for s in group) / n for group in groups]
    return metrics


def pass_at(k: int, n: int, right: int) -> float:
    """Probability that k of n samples, of which `right` are right, contain a right one:
    1 - C(n - right, k) / C(n, k) (arXiv 2107.03374, eq. 1)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(group: Sequence[Sample]) -> float:
    """1 if the most frequent answer of one prompt's samples is right, else 0. For several most frequent
    answers: the share of right ones. Samples without an answer don't vote."""
    votes = Counter(s.answer for s in group if s.answer is not None)
    top = [a for a, count in votes.items() if count == max(votes.values())]
    right = {s.answer for s in group if s.reward > 0}
    return sum(a in right for a in top) / len(top) if top else 0.0


def mean(values: Sequence[float]) -> float:
    """Mean of the problems' values; 0 where sampling was aborted and there are none."""
    return math.fsum(values) / max(len(values), 1)


def std_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean of the problems' values: their standard deviation (with n - 1) divided by
    √n. None for fewer than two. Of two models' differences on the same problems it is the paired one (arXiv
    2411.00640)."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


# --- results


def summary(cfg: Config, problems: Mapping[str, Problems], scores: Scores) -> dict[str, Any]:
    """Value and standard error of each metric, and what it was measured on, by set."""
    found = {}
    for i, (name, metrics) in enumerate(scores.items()):
        found[name] = {
            "file": cfg.eval_data[i], "hash": fingerprint(problems[name]), "problems": len(problems[name]),
            "samples": cfg.eval_samples[i % len(cfg.eval_samples)],
            "metrics": {metric: {"value": mean(values), "stderr": std_error(values)}
                        for metric, values in metrics.items()}}
    return found


def differences(problems: Mapping[str, Problems], scores: Scores, first: Mapping[str, Problems],
                of_first: Scores) -> dict[str, Any]:
    """Differences of a model's metrics to the first model's, with paired standard errors, by set. Problems
    that only one of them has, because the other's prompt is too long, are left out."""
    found = {}
    for name, metrics in scores.items():
        rows, rows_of_first = ([x.where(i) for i in range(len(x))] for x in (problems[name], first[name]))
        place = {row: i for i, row in enumerate(rows_of_first)}
        pairs = [(i, place[row]) for i, row in enumerate(rows) if row in place]
        gaps = {metric: [values[i] - of_first[name][metric][j] for i, j in pairs]
                for metric, values in metrics.items()}
        found[name] = {"problems": len(pairs), "metrics": {
            metric: {"value": mean(values), "stderr": std_error(values)} for metric, values in gaps.items()}}
    return found


def lm_eval_form(facts: Mapping[str, Any], sets: Mapping[str, Any]) -> dict[str, Any]:
    """The same results in the form of lm-evaluation-harness 0.4, which other programs read. A set is a task
    there, its version is the hash of its problems, and the filter's name is none."""
    results, better = {}, {}
    for name, found in sets.items():
        results[name] = {"alias": name}
        better[name] = {m: m != "truncated" for m in found["metrics"] if m != "response_len"}
        for metric, score in found["metrics"].items():
            stderr = "N/A" if score["stderr"] is None else score["stderr"]
            results[name] |= {f"{metric},none": score["value"], f"{metric}_stderr,none": stderr}
    counts = {name: {"original": found["problems"], "effective": found["problems"]}
              for name, found in sets.items()}
    configs = {name: {"task": name, "dataset_path": found["file"], "repeats": found["samples"],
                      "num_fewshot": 0} for name, found in sets.items()}
    return {"results": results, "group_subtasks": {name: [] for name in sets}, "configs": configs,
            "versions": {name: found["hash"] for name, found in sets.items()},
            "n-shot": dict.fromkeys(sets, 0), "higher_is_better": better, "n-samples": counts,
            "config": {"model": "torz", "model_args": f"pretrained={facts['model']}",
                       "random_seed": facts["flags"]["seed"], "gen_kwargs": facts["flags"]},
            "model_name": facts["model"], "date": datetime.fromisoformat(facts["date"]).timestamp(),
            **{f"{name.replace('-', '_')}_version": found for name, found in facts["versions"].items()}}


def save_results(folder: Path, facts: Mapping[str, Any], sets: Mapping[str, Any], rows: Sequence[dict],
                 compared: Mapping[str, Any]) -> None:
    """Write samples.jsonl, scores.json and lm_eval.json to a model's folder. compared: {} or what is to be
    said of the first model."""
    with (folder / "samples.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    results = {"scores.json": {**facts, "sets": sets, **compared}, "lm_eval.json": lm_eval_form(facts, sets)}
    for name, content in results.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")


# --- tables of at most 80 columns


def score_table(sets: Mapping[str, Any]) -> list[str]:
    """Lines with the metrics of one model."""
    lines = [f"{'set':26} {'metric':13}{'value':>12}{'std error':>12}{'problems':>9}{'n':>5}"]
    for name, found in sets.items():
        for metric, score in found["metrics"].items():
            lines.append(f"{tail(name, 26)} {metric:13}{decimals(score['value']):>12}"
                         f"{decimals(score['stderr']):>12}{found['problems']:>9}{found['samples']:>5}")
    return lines


def comparison_table(models: Sequence[tuple[str, dict, dict]]) -> list[str]:
    """Lines with avg@n of each set and model, and its difference to the first model. models: name, `summary`
    and `differences`, which are empty for the first one."""
    lines = [f"{'model':26} {'set/metric':19} {'value':>15} {'minus the first':>16}"]
    for set_name, found in models[0][1].items():
        metric = next(iter(found["metrics"]))
        for model, sets, gaps in models:
            score, gap = (part[set_name]["metrics"][metric] if part else {} for part in (sets, gaps))
            value = f"{decimals(score['value'])} ± {decimals(score['stderr'])}"
            versus = f"{gap['value']:+.4f} ± {decimals(gap['stderr'])}" if gap else ""
            line = f"{tail(model, 26)} {tail(f'{set_name}/{metric}', 19)} {value:>15} {versus:>16}"
            lines.append(line.rstrip())
    return lines


def tail(text: str, width: int) -> str:
    """The end of a text, padded to `width` columns."""
    return (text if len(text) <= width else "…" + text[1 - width:]).ljust(width)


def decimals(value: float | None) -> str:
    """A number with four decimals; n/a for None."""
    return "n/a" if value is None else f"{value:.4f}"
