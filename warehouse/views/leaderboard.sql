-- Runs ranked by A of identified fits over all held-out prompts, then by B; A, B and C_mid of a fit that is not identified are null and its verdict says why.
-- rank: place among the identified fits of the same axis; null for a fit that is not identified
-- a: A, asymptote; null unless the fit is identified
-- b: B, scaling exponent; null unless the fit is identified
-- c_mid: C_mid, axis value at half of the gain; null unless the fit is identified
-- pass_rate: pass rate of the last evaluation
WITH last AS (
    SELECT run_id, arg_max(pass_rate, step) AS pass_rate FROM curve WHERE task = 'all' GROUP BY run_id
)
SELECT
    CASE WHEN f.verdict = 'identified' THEN rank() OVER (
        PARTITION BY f.axis, f.verdict = 'identified' ORDER BY f.a DESC, f.b DESC) END AS rank,
    f.run_id, f.recipe_name, f.seed, f.axis, f.unit,
    CASE WHEN f.verdict = 'identified' THEN f.a END AS a,
    CASE WHEN f.verdict = 'identified' THEN f.a_run_lo END AS a_run_lo,
    CASE WHEN f.verdict = 'identified' THEN f.a_run_hi END AS a_run_hi,
    CASE WHEN f.verdict = 'identified' THEN f.b END AS b,
    CASE WHEN f.verdict = 'identified' THEN f.c_mid END AS c_mid,
    f.verdict, f.reason, f.step, last.pass_rate
FROM latest_fit f
LEFT JOIN last ON last.run_id = f.run_id
ORDER BY f.axis, rank NULLS LAST, last.pass_rate DESC NULLS LAST, f.run_id;
