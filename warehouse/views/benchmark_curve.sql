-- Downstream benchmarks against compute, one row per evaluation; the holdout is never among them.
-- benchmark: name of the benchmark, for example gsm8k
-- settings: how it was asked (samples, temperature, prompts, seed, digest of the prompt form and file); compare rows of equal settings only
-- compute: device-hours on the surviving line of steps (compute_curve); null for a checkpoint of no run
SELECT
    e.run_id, r.recipe_name, r.seed, split_part(e.benchmark, '@', 1) AS benchmark, regexp_replace(e.benchmark, '^[^@]*@', '') AS settings,
    e.task, e.step, e.compute_curve AS compute, e.tokens_total, e.flops, e.pass_rate, e.stderr, e.prompts, e.samples, e.truncated_share,
    e.interrupted_share, e.unverifiable, e.tokens_mean, e.policy_version
FROM evaluations e
LEFT JOIN runs r ON r.run_id = e.run_id
WHERE e.benchmark LIKE '%@%' AND e.benchmark NOT LIKE 'holdout@%'
ORDER BY e.run_id, e.benchmark, e.step;
