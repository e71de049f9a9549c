"""Jobs: the line, run from end to end.

    build_index     sources in, one published generation out: staging, then
    cluster_corpus  clusters and context, once for a collection
    encode_corpus   every staged shard through the encoder
    write_index     encoded shards into the tables, and the generation published
    train_encoder   `cairn train` as a job
    plan_index      what build_index would do, and how long it would take
    run             one run: its identity, its checks and its record
    pending         what an unfinished run leaves behind, so that the next one goes on from there
    engine          who encodes: one encoder_worker in this process, or
    ray_engine      many on a cluster: ray_pool has workers and deadlines, ray_runtime connects, ray_local starts a Ray
    recontextualise another context for the whole corpus: all of the above from the stored texts
    ingest_settings what an ingest is asked for, over what the collection was built with
    job_file        a job in a TOML file (configs/*.toml), which job runs in a process and submission on a cluster; progress_log its lines
    schedules       what runs when; schedule_history what ran; scheduler the process that starts it

Only this package may know how work is spread over processes and machines; the stages it calls are in
`pipeline`.
"""
