-- Warning signs per update; truncation first (10 to 15% of a batch marks a run about to destabilise, section 4 of the paper).
-- truncated_share_20: truncated traces over traces in the last 20 updates
-- truncation_alarm: true when truncated_share_20 is at least 0.10
-- not_updated_20: updates among the last 20 that changed nothing (nothing to learn from, or a gradient that was not finite)
SELECT
    run_id, step,
    truncated_share,
    sum(traces_truncated) OVER recent / nullif(sum(traces) OVER recent, 0) AS truncated_share_20,
    sum(traces_truncated) OVER recent / nullif(sum(traces) OVER recent, 0) >= 0.10 AS truncation_alarm,
    zero_variance_share, interrupted_share,
    logprob_gap_mean, logprob_gap_max, ratio_max, ratio_clipped_share,
    staleness_mean, staleness_max,
    grad_norm, train_entropy, unverifiable,
    count(*) FILTER (NOT updated) OVER recent AS not_updated_20
FROM train_steps
WINDOW recent AS (PARTITION BY run_id ORDER BY step ROWS BETWEEN 19 PRECEDING AND CURRENT ROW)
ORDER BY run_id, step;
