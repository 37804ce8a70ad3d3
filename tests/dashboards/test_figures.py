"""The group-size figure: its numbers, its order, and what it must say or withhold."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import ErrorbarContainer
from matplotlib.table import Cell
from matplotlib.text import Text

from dashboards.__main__ import main
from dashboards.compose.curves import NON_PRIVATE_COLOUR
from dashboards.compose.figure import content_of
from dashboards.compose.panels import GRADIENT_SNR, SCORES
from dashboards.compose.questions import QUESTIONS
from dashboards.compose.tables import summary_table
from dashboards.errors import DashboardError
from dashboards.figures import write_figure, write_table
from dashboards.query.trials import load_trials
from dashboards.render.interactive import interactive_figure
from dashboards.render.printed import printed_figure

TUNING_COST = "Open release: all 12 trials together ε = 40 at δ = 1.5e-06"


def group_size_content(trials):
    return content_of(trials, "group-size")


def group_size_figure(trials):
    return printed_figure(group_size_content(trials))


def interactive_group_size_figure(trials):
    return interactive_figure(group_size_content(trials))


def score_panels(content):
    return [panel for panel in content.panels if panel.legend == SCORES]


def snr_panel(content):
    return next((panel for panel in content.panels if panel.legend == GRADIENT_SNR), None)


def words(figure):
    """All text of a drawn figure, line breaks and hard spaces as spaces."""
    texts = [text.get_text() for text in figure.findobj(Text)]
    texts += [cell.get_text().get_text() for cell in figure.findobj(Cell)]
    return " ".join(" ".join(texts).replace("\u00a0", " ").split())


def curve_of(content, epsilon, panel=0):
    label = "ε = ∞ (non-private)" if math.isinf(epsilon) else f"ε = {epsilon:g}"
    return next(curve for curve in score_panels(content)[panel].curves if curve.style.label == label)


def by_hand(trials, metric, size, epsilon):
    values = [
        row[metric]
        for _, row in trials.iterrows()
        if row["group_size"] == size and row["target_epsilon"] == epsilon
    ]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def test_figure_from_mlflow_alone_has_the_means_and_errors_computed_by_hand(tracking):
    uri, trials = tracking
    figure = group_size_figure(load_trials(uri, "new"))
    bars = [c for c in figure.axes[0].containers if isinstance(c, ErrorbarContainer)]
    private = next(c for c in bars if c.get_label() == "ε = 10")
    drawn = private[0].get_ydata(orig=False)
    errors = [(segment[1, 1] - segment[0, 1]) / 2 for segment in private[2][0].get_segments()]
    wanted = [by_hand(trials, "knn_accuracy", size, 10.0) for size in (2, 8, 64, "batch")]
    np.testing.assert_allclose(drawn, [100 * mean for mean, _ in wanted])
    np.testing.assert_allclose(errors, [100 * error for _, error in wanted])


def test_figure_snr_panel_has_the_means_computed_by_hand(make_trials):
    trials = make_trials()
    curve = next(
        c for c in snr_panel(group_size_content(trials)).curves if c.style.label.startswith("with aug")
    )
    wanted = [by_hand(trials, "snr_first_step", size, 10.0)[0] for size in (2, 8, 64, "batch")]
    np.testing.assert_allclose(curve.mean, wanted)


def test_figure_draws_snr_with_and_without_augmentation_on_a_log_scale(make_trials):
    figure = group_size_figure(make_trials())
    snr = next(ax for ax in figure.axes if "SNR" in ax.get_ylabel())
    labels = [container.get_label() for container in snr.containers]
    assert labels == ["with augmentation, Nₐ = 1", "without augmentation"]
    assert snr.get_yscale() == "log"


def test_figure_snr_of_unaugmented_trials_counts_as_without_augmentation(make_trials):
    trials = make_trials(augmentations=(0,)).drop(columns="snr_first_step_no_augmentation")
    assert [curve.style.label for curve in snr_panel(group_size_content(trials)).curves] == [
        "without augmentation"
    ]


def test_figure_has_batch_last(make_trials):
    trials = make_trials(sizes=("batch", 64, 2, 8))
    figure = group_size_figure(trials)
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels == ["2", "8", "64", "batch"]
    assert list(figure.axes[0].get_xticks()) == sorted(figure.axes[0].get_xticks())


def test_figure_axis_is_logarithmic_in_the_group_size(make_trials):
    axis = group_size_content(make_trials(sizes=(2, 8, 64))).panels[0].axis
    assert list(axis.positions.values()) == [1.0, 3.0, 6.0]


def test_figure_states_epsilon_delta_and_the_relation(make_trials):
    text = words(group_size_figure(make_trials()))
    assert "Fashion-MNIST: DP-GCL, ε = 10, δ = 1.5e-06 (add or remove one record)" in text


def test_figure_states_noise_batch_and_steps(make_trials):
    text = words(group_size_figure(make_trials()))
    assert all(part in text for part in ("σ = 1.25", "B = 1200 expected", "T = 600"))


def test_figure_says_what_tuning_costs(make_trials):
    assert TUNING_COST in words(group_size_figure(make_trials()))


def test_figure_states_what_the_error_bars_are(make_trials):
    assert "mean ± standard error over 3 repeats" in words(group_size_figure(make_trials()))


def test_figure_draws_the_untrained_network_with_its_band(make_trials):
    reference = score_panels(group_size_content(make_trials()))[0].reference
    assert reference.mean == pytest.approx(51.0)
    assert reference.standard_error == pytest.approx(1 / math.sqrt(3))


def test_figure_has_a_column_for_each_score(make_trials):
    labels = [ax.get_ylabel() for ax in group_size_figure(make_trials()).axes]
    assert labels[:2] == ["k-NN accuracy (%)", "Linear probe accuracy (%)"]


def test_figure_without_labels_shows_view_retrieval(make_trials):
    trials = make_trials(scores=("view_retrieval_top1", "view_retrieval_top10"))
    labels = [ax.get_ylabel() for ax in group_size_figure(trials).axes]
    assert labels[:2] == ["View retrieval, top 1 (%)", "View retrieval, top 10 (%)"]


def test_figure_tells_numbers_of_augmentations_apart_by_dashes(make_trials):
    curves = score_panels(group_size_content(make_trials(augmentations=(1, 4))))[0].curves
    assert len({(curve.style.colour, curve.style.dash) for curve in curves}) == len(curves) == 4


def test_figure_of_private_data_has_no_curve_without_noise(make_trials):
    content = group_size_content(make_trials(data_is="private"))
    assert all(
        curve.style.colour != NON_PRIVATE_COLOUR for panel in score_panels(content) for curve in panel.curves
    )


def test_figure_of_private_data_has_no_snr(make_trials):
    assert snr_panel(group_size_content(make_trials(data_is="private"))) is None


def test_figure_of_private_data_says_what_is_withheld(make_trials):
    text = words(group_size_figure(make_trials(data_is="private")))
    assert "training data are private: trials with ε = ∞" in text


def test_figure_counts_untagged_data_as_private(make_trials):
    content = group_size_content(make_trials().drop(columns="data_is"))
    assert snr_panel(content) is None


def test_figure_without_scores_shows_the_facts_and_why(make_trials):
    text = words(group_size_figure(make_trials(scores=(), data_is="private")))
    assert "ε spent" in text
    assert "9.99" in text
    assert "No scores: they would be computed from private records" in text


def test_figure_of_private_data_without_noise_is_refused(make_trials):
    with pytest.raises(DashboardError, match="private"):
        group_size_figure(make_trials(data_is="private", epsilons=(math.inf,)))


def test_figure_of_seeded_trials_claims_no_guarantee(make_trials):
    assert "NO GUARANTEE" in words(group_size_figure(make_trials(guarantee_label="none")))


def test_figure_of_one_repeat_has_no_error_bars_and_says_so(make_trials):
    figure = group_size_figure(make_trials(num_repeats=1))
    segments = figure.axes[0].containers[0][2][0].get_segments()
    assert all(segment[0, 1] == segment[1, 1] for segment in segments)
    assert "One repeat: no error bars" in words(figure)


def test_figure_says_when_trials_are_missing(make_trials):
    assert "over 2 to 3 repeats (some trials are missing)" in words(group_size_figure(make_trials()[1:]))


def test_figure_leaves_out_a_point_without_trials(make_trials):
    trials = make_trials()
    gone = (trials["group_size"] == 8) & (trials["target_epsilon"] == 10.0)
    content = group_size_content(trials[~gone])
    assert curve_of(content, 10.0).names == ["2", "64", "batch"]
    assert curve_of(content, math.inf).names == ["2", "8", "64", "batch"]


def test_figure_says_when_restarts_spent_more_than_the_target(make_trials):
    text = words(group_size_figure(make_trials(epsilon=11.5)))
    assert "12 of 12 private trials spent more than their target ε, up to 11.5" in text


def test_figure_refuses_to_average_trials_that_are_no_repeats(make_trials):
    mixed = pd.concat([make_trials(temperature=0.1), make_trials(temperature=0.5)])
    with pytest.raises(DashboardError, match=r"temperature \(0\.1, 0\.5\)"):
        group_size_figure(mixed)


def test_figure_names_the_params_it_lacks(make_trials):
    with pytest.raises(DashboardError, match="group_size"):
        group_size_figure(make_trials().drop(columns="group_size"))


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"augmentations": (0, 1, 4), "epsilons": (1.0, 3.0, 10.0, math.inf)},
        {"scores": ("knn_accuracy",)},
        {"scores": ()},
        {"data_is": "private"},
        {"scores": (), "data_is": "private"},
        {"num_repeats": 1, "sizes": ("batch",)},
    ],
)
def test_figure_words_stay_on_the_page_and_off_each_other(make_trials, shape):
    figure = group_size_figure(make_trials(**shape))
    FigureCanvasAgg(figure).draw()
    page = figure.bbox
    boxes = [text.get_window_extent() for text in figure.texts]
    boxes += [legend.get_window_extent() for ax in figure.axes for legend in ax.artists]
    boxes += [ax.xaxis.label.get_window_extent() for ax in figure.axes if ax.axison]
    assert all(page.x0 <= box.x0 and box.x1 <= page.x1 for box in boxes)
    assert all(page.y0 <= box.y0 and box.y1 <= page.y1 for box in boxes)
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]


def test_interactive_figure_has_the_numbers_of_the_printed_one(make_trials):
    content = group_size_content(make_trials())
    traces = {trace.name: trace for trace in interactive_group_size_figure(make_trials()).data[:3]}
    curve = curve_of(content, 10.0)
    assert list(traces["ε = 10"].y) == curve.mean
    assert list(traces["ε = 10"].error_y.array) == curve.standard_error


def test_interactive_figure_tells_mean_error_and_repeats_on_hovering(make_trials):
    trials = make_trials()
    mean, error = by_hand(trials, "knn_accuracy", 8, 10.0)
    trace = next(t for t in interactive_group_size_figure(trials).data if t.name == "ε = 10")
    assert trace.text[1] == (f"S = 8<br>mean {100 * mean:.4g}<br>standard error {100 * error:.2g}<br>n = 3")


@pytest.mark.parametrize("level", [0.0, 1.0])
def test_interactive_figure_has_room_around_an_extreme_untrained_line(make_trials, level):
    figure = interactive_group_size_figure(make_trials(untrained_knn_accuracy=level))
    low, high = figure.layout.yaxis.range
    line = next(trace for trace in figure.data if trace.name == "untrained network")
    drawn = [value for trace in figure.data if trace.yaxis == "y" for value in trace.y]
    assert set(line.y) == {100 * level}
    room = 0.02 * (high - low)
    assert low + room < min(drawn)
    assert max(drawn) < high - room


def test_interactive_figure_has_room_around_an_extreme_error_bar(make_trials):
    content = group_size_content(make_trials(untrained_knn_accuracy=0.7))
    figure = interactive_figure(content)
    ends = [
        mean + sign * error
        for curve in content.panels[0].curves
        for mean, error in zip(curve.mean, curve.standard_error, strict=True)
        for sign in (-1, 1)
    ]
    low, high = figure.layout.yaxis.range
    assert low < min(ends)
    assert max(ends) < high


def test_interactive_figure_of_values_that_are_all_one_has_a_range(make_trials):
    trials = make_trials(
        num_repeats=1, scores=("knn_accuracy",), knn_accuracy=0.0, untrained_knn_accuracy=0.0
    )
    low, high = interactive_group_size_figure(trials).layout.yaxis.range
    assert low < 0 < high


def test_interactive_figure_has_every_snr_in_its_logarithmic_range(make_trials):
    content = group_size_content(make_trials())
    figure = interactive_figure(content)
    low, high = figure.layout[f"yaxis{len(content.panels)}"].range
    means = [mean for curve in snr_panel(content).curves for mean in curve.mean]
    assert 10**low < min(means)
    assert max(means) < 10**high
    assert high - low < 5


def test_html_contains_numbers_notes_and_needs_no_network(make_trials, tmp_path):
    trials = make_trials()
    _, page = write_figure(trials, tmp_path, "group-size")
    text = page.read_text(encoding="utf-8")
    mean, error = by_hand(trials, "knn_accuracy", 8, 10.0)
    assert f"{100 * mean:.2f} ± {100 * error:.2f}" in text
    assert TUNING_COST in text
    assert 'script src="http' not in text


def test_html_of_a_hostile_data_set_name_holds_no_markup(make_trials, tmp_path):
    _, page = write_figure(make_trials(dataset="<img src=x onerror=alert(1)>"), tmp_path, "group-size")
    assert "<img src=x" not in page.read_text(encoding="utf-8")


def test_png_is_written_at_print_resolution(make_trials, tmp_path):
    from PIL import Image

    png, _ = write_figure(make_trials(), tmp_path, "group-size")
    with Image.open(png) as picture:
        assert round(picture.info["dpi"][0]) == 200


def test_summary_table_has_mean_error_and_n_of_each_cell(make_trials):
    trials = make_trials()
    table = summary_table(trials, QUESTIONS["group-size"])
    row = table[(table["group_size"] == 64) & (table["target_epsilon"] == math.inf)].iloc[0]
    mean, error = by_hand(trials, "linear_probe_accuracy", 64, math.inf)
    assert row["linear_probe_accuracy_mean"] == pytest.approx(mean)
    assert row["linear_probe_accuracy_standard_error"] == pytest.approx(error)
    assert row["linear_probe_accuracy_n"] == 3


def test_summary_table_of_private_data_withholds_snr_and_unnoised_trials(make_trials):
    table = summary_table(make_trials(data_is="private"), QUESTIONS["group-size"])
    assert not [name for name in table if name.startswith("snr")]
    assert set(table["target_epsilon"]) == {10.0}


def test_summary_csv_keeps_every_digit(make_trials, tmp_path):
    trials = make_trials()
    csv, _ = write_table(trials, tmp_path, "group-size")
    np.testing.assert_array_equal(
        pd.read_csv(csv)["knn_accuracy_mean"],
        summary_table(trials, QUESTIONS["group-size"])["knn_accuracy_mean"],
    )


def test_summary_text_states_epsilon_delta_and_the_notes(make_trials, tmp_path):
    _, text = write_table(make_trials(), tmp_path, "group-size")
    words_of_file = text.read_text(encoding="utf-8")
    assert "ε = 10, δ = 1.5e-06" in words_of_file
    assert TUNING_COST in words_of_file


def test_command_draws_from_mlflow_alone(tracking, tmp_path, capsys):
    assert main(["group-size", "--tracking-uri", tracking[0], "--output", str(tmp_path)]) == 0
    names = {"group_size.png", "group_size.html", "group_size.csv", "group_size.md"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert "group_size.png" in capsys.readouterr().out


def test_command_takes_the_address_from_the_environment(tracking, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking[0])
    assert main(["list"]) == 0
    assert "new" in capsys.readouterr().out


def test_command_falls_back_to_the_storage_folder(tracking, monkeypatch, capsys):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("DPGCL_STORAGE", tracking[0].removeprefix("sqlite:///").removesuffix("/mlflow.db"))
    assert main(["list"]) == 0
    assert "old" in capsys.readouterr().out


def test_command_error_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert main(["list", "--tracking-uri", f"sqlite:///{tmp_path}/mlflow.db"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no MLflow database")
    assert error.count("\n") == 1
