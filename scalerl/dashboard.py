# mypy: ignore-errors
"""A notebook over the warehouse: leaderboard, curves, comparison of runs, stability.

Start it with `scalerl warehouse dashboard` (needs the extra `dashboard`); it only reads, listens on loopback and loads nothing from the network.
"""

import marimo

app = marimo.App(width="full", app_title="ScaleRL warehouse")


@app.cell
def _():
    import marimo as mo

    from scalerl.home import warehouse_root
    from warehouse import query

    root = warehouse_root()

    def ask(text, parameters=()):
        return query.rows(root, text, parameters)

    return ask, mo, root


@app.cell
def _(mo, root):
    refresh = mo.ui.refresh(options=["10s", "1m", "10m"], default_interval=None, label="read again every")
    mo.vstack([mo.md(f"# Study\n`{root}`"), refresh])
    return (refresh,)


@app.cell
def _(ask, mo, refresh):
    refresh  # noqa: B018  (a change reads the warehouse again)
    board = ask(
        "SELECT rank, run_id, axis, round(a, 4) AS a, round(a_run_lo, 4) AS a_lo, round(a_run_hi, 4) AS a_hi, round(b, 3) AS b, "
        "round(c_mid, 4) AS c_mid, verdict, reason FROM leaderboard"
    )
    summary = ask(
        "SELECT run_id, state, steps_done, target_steps, round(last_pass_rate, 4) AS last_pass_rate, round(a, 4) AS a, verdict, "
        "round(compute_paid, 4) AS compute_paid, compute_unit, incidents FROM run_summary"
    )
    table = mo.ui.table(board, selection=None, page_size=15, show_column_summaries=False, show_data_types=False)
    nothing = mo.md("No fits yet. They appear after a run's last evaluation, or with `scalerl fit`.")
    mo.vstack(
        [
            mo.md(
                "## Leaderboard\nRuns by A of identified fits, then by B. A fit that is not identified shows its verdict instead of an A."
            ),
            table if board else nothing,
        ]
    )
    return (summary,)


@app.cell
def _(mo, summary):
    names = [row["run_id"] for row in summary]
    chosen = mo.ui.multiselect(options=names, value=names[-4:], label="runs", full_width=True)
    axis = mo.ui.dropdown(
        options={"compute": "compute", "tokens": "tokens_total", "steps": "step", "FLOPs": "flops"},
        value="compute",
        label="axis",
    )
    mo.vstack([mo.md("## Curves"), chosen, axis])
    return axis, chosen


@app.cell
def _(ask, axis, chosen, mo, summary):
    # Compute of different units cannot share an axis: one panel for each unit.
    unit_of = {row["run_id"]: row["compute_unit"] if axis.value == "compute" else "" for row in summary}
    units = sorted({unit_of[run] or "" for run in chosen.value})

    def figure_of_curves():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.5, 1 + 3.2 * len(units)), layout="constrained")
        panels = dict(zip(units, figure.subplots(len(units), 1, squeeze=False).ravel(), strict=True))
        for run in chosen.value:
            points = ask(
                f"SELECT {axis.value} AS x, pass_rate, stderr FROM curve WHERE run_id = ? AND task = 'all' ORDER BY step",
                [run],
            )
            points = [point for point in points if point["x"] is not None]
            errors = [point["stderr"] or 0.0 for point in points]
            panels[unit_of[run] or ""].errorbar(
                [p["x"] for p in points], [p["pass_rate"] for p in points], errors, marker="o", ms=3, lw=1, label=run
            )
        for unit, panel in panels.items():
            panel.set_xlabel(f"{axis.selected_key}, {unit}" if unit else axis.selected_key)
            panel.set_ylabel("held-out pass rate (mean@k)")
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8)
        return figure

    mo.md("Choose at least one run.") if not chosen.value else figure_of_curves()
    return


@app.cell
def _(ask, chosen, mo, summary):
    picked = [row for row in summary if row["run_id"] in chosen.value]
    compared = [
        row
        for row in ask(
            "SELECT run_id, other_run_id, axis, a_difference, a_difference_lo, a_difference_hi, verdict, reason FROM comparisons"
        )
        if row["run_id"] in chosen.value or row["other_run_id"] in chosen.value
    ]
    plain = {"selection": None, "show_column_summaries": False, "show_data_types": False}
    mo.vstack(
        [
            mo.md("## Comparison"),
            mo.ui.table(picked, **plain) if picked else mo.md("Choose at least one run."),
            mo.ui.table(compared, **plain)
            if compared
            else mo.md("No stored comparison of these runs; `scalerl compare` makes one."),
        ]
    )
    return


@app.cell
def _(ask, chosen, mo):
    def figure_of_stability():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.5, 6), layout="constrained")
        panels = figure.subplots(2, 2, sharex=True).ravel()
        shown = {
            "truncated_share_20": "truncated share, last 20 updates",
            "zero_variance_share": "zero-variance share of groups",
            "logprob_gap_mean": "|log-probability trainer - generator|, nats",
            "staleness_max": "largest staleness, updates",
        }
        for run in chosen.value:
            rows = ask("SELECT * FROM stability WHERE run_id = ? ORDER BY step", [run])
            if not rows:  # an imported curve has evaluations alone
                continue
            for panel, (column, label) in zip(panels, shown.items(), strict=True):
                panel.plot([row["step"] for row in rows], [row[column] for row in rows], lw=1, label=run)
                panel.set_title(label, fontsize=9)
                panel.grid(alpha=0.3)
        panels[0].axhline(0.10, color="tab:red", lw=0.8, ls="--")
        panels[2].set_xlabel("step")
        panels[3].set_xlabel("step")
        handles, labels = panels[0].get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, fontsize=7, ncols=4, loc="outside lower center")
        return figure

    mo.vstack(
        [
            mo.md("## Stability\nA truncated share of 10 to 15% (dashed line) marks a run about to destabilise."),
            figure_of_stability() if chosen.value else mo.md("Choose at least one run."),
        ]
    )
    return


if __name__ == "__main__":
    app.run()
