"""`python -m gdsdata.bench`: gdsdata beside its alternatives and beside what the machine can do (--help says more).

case        what every case does: rows take turns, limits between them, into one result loader
case=loader: shuffled batches; its runs, and how they are verified and timed peers       GDSDataset
and the other loaders, behind one small interface; dali has DALI's load        case=load: one big
file into tensors load_peers  read_tensor and the other ways to do that checkpoint  case=checkpoint:
a state saved, loaded, and saved behind the program; checkpoint_peers has who does it latency
case=latency: one tensor again and again, by size; latency_peers has who reads and writes it,
            latency_report its tables and picture, own_folder where its files are and how they go
tensor      case=tensor: one big tensor loaded and stored, measured as latency does; tensor_peers
has who does it,
            tensor_report its tables, laid out as DeepNVMe's, and picture
io          case=io: transfers of one size; io_peers has who carries them, pattern the bytes, sweep
the picture train       case=train: a training loop from files to weights; train_peers has who feeds
it and saves its checkpoints,
            train_models what is trained, train_data and image_shards what is read, train_report
            tables and picture
tune        case=tune: the best options for a path and device; search has how it looks for them,
tune_work what is
            measured, tune_report its answer and picture
all         case=all: every other case, one after the other; all_report has the page startup
case=startup: a training script's start, by part; startup_peers is that script, by each library,
            startup_report its tables and picture
compare     python -m gdsdata.bench.compare A B: what changed between two runs, and what may be
chance process     the process of one row, as the bench sees it row         the same from inside
kvikio_ways kvikio's settings, and what carries its bytes device      the GPU: context,
synchronizing, pinned memory pieces      long tensors made, changed and compared, by several threads
limits      what the machine can do at most measure     CPU time, memory, the page cache's state
data        data sets, made or the user's own, and what their batches must be intervals   mean,
percentiles, Student's intervals report      tables, JSON, picture, markdown; page has report.html
settings    what can be set, and the text of --help
"""
