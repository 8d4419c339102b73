#include "dtensor/parallel/pipeline/schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

using Kind = PipelineAction::Kind;
using Actions = std::vector<PipelineAction>;

std::string TextOf(const PipelineAction& a) {
  return absl::StrCat(a.stage, a.kind == Kind::kForward ? "F" : "B", a.microbatch);
}

// All forwards of a rank in order, and all backwards. Its stages are those of `chunk` 0, 1, ...
struct Lists {
  Actions forwards, backwards;
};
Lists ListsOf(int rank, int ranks, int64_t microbatches, int chunks, int64_t at_a_time) {
  Lists lists;
  for (int64_t first = 0; first < microbatches; first += at_a_time) {
    const int64_t end = std::min(first + at_a_time, microbatches);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      for (int64_t m = first; m < end; ++m) {
        lists.forwards.push_back({Kind::kForward, chunk * ranks + rank, m});
        lists.backwards.push_back({Kind::kBackward, (chunks - 1 - chunk) * ranks + rank, m});
      }
    }
  }
  return lists;
}

// `ahead` forwards, then a forward and a backward in turn, then what is left.
Actions Alternating(const Lists& lists, int64_t ahead) {
  const auto n = static_cast<int64_t>(lists.forwards.size());
  Actions actions(lists.forwards.begin(), lists.forwards.begin() + ahead);
  for (int64_t i = 0; i < n; ++i) {
    if (ahead + i < n) actions.push_back(lists.forwards[ahead + i]);
    actions.push_back(lists.backwards[i]);
  }
  return actions;
}

// When each action of a schedule ends, and the rest that a run of it shows.
struct Run {
  std::vector<std::vector<double>> forward, backward;  // [stage][microbatch]
  PipelineTimes times;
};

// Whether each action is there once, where its stage is, a forward before its backward.
absl::Status CheckActions(const PipelineSchedule& s) {
  const auto wrong = [](auto... parts) {
    return absl::InvalidArgumentError(absl::StrCat("[pipeline schedule] ", parts...));
  };
  if (s.ranks.empty() || s.stages < 1 || s.microbatches < 1) {
    return wrong("needs ranks, stages and microbatches, has ", s.ranks.size(), ", ", s.stages,
                 " and ", s.microbatches);
  }
  // 1: forward, 2: backward too. Of what there is only: numbers of stages may be anything.
  std::map<std::pair<int, int64_t>, int> seen;
  for (size_t rank = 0; rank < s.ranks.size(); ++rank) {
    for (const PipelineAction& a : s.ranks[rank]) {
      if (a.kind != Kind::kForward && a.kind != Kind::kBackward) {
        return wrong("transfers are put in by WithTransfers");
      }
      const std::string what = TextOf(a);
      if (a.stage < 0 || a.stage >= s.stages || a.microbatch < 0 ||
          a.microbatch >= s.microbatches) {
        return wrong(what, " is outside of ", s.stages, " stages and ", s.microbatches,
                     " microbatches");
      }
      if (s.RankOf(a.stage) != static_cast<int>(rank)) {
        return wrong(what, " is on rank ", rank, ", stage ", a.stage, " on rank ",
                     s.RankOf(a.stage));
      }
      int& state = seen[{a.stage, a.microbatch}];
      const int expected = a.kind == Kind::kForward ? 0 : 1;
      if (state > expected) return wrong(what, " is there twice");
      if (state < expected) return wrong(what, " comes before its forward");
      ++state;
    }
  }
  for (int stage = 0; stage < s.stages; ++stage) {
    for (int64_t m = 0; m < s.microbatches; ++m) {
      const auto found = seen.find({stage, m});
      const int state = found == seen.end() ? 0 : found->second;
      if (state < 2) return wrong(stage, state == 0 ? "F" : "B", m, " is missing");
    }
  }
  return absl::OkStatus();
}

// Each rank does what it can as soon as it can.
absl::StatusOr<Run> Simulate(const PipelineSchedule& s, double forward, double backward) {
  DT_RETURN_IF_ERROR(CheckActions(s));
  constexpr double kNotYet = -1;
  const std::vector<double> none(static_cast<size_t>(s.microbatches), kNotYet);
  Run run;
  run.forward.assign(static_cast<size_t>(s.stages), none);
  run.backward = run.forward;
  const size_t p = s.ranks.size();
  run.times.busy.assign(p, 0);
  run.times.peak.assign(p, 0);
  std::vector<size_t> next(p, 0);
  std::vector<double> now(p, 0);
  std::vector<int64_t> kept(p, 0);
  // When what the action needs of its neighbour is there.
  const auto needed = [&](const PipelineAction& a) -> double {
    if (a.kind == Kind::kForward) return a.stage == 0 ? 0 : run.forward[a.stage - 1][a.microbatch];
    const bool last = a.stage + 1 == s.stages;
    return last ? run.forward[a.stage][a.microbatch] : run.backward[a.stage + 1][a.microbatch];
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t rank = 0; rank < p; ++rank) {
      while (next[rank] < s.ranks[rank].size()) {
        const PipelineAction& a = s.ranks[rank][next[rank]];
        const double from = needed(a);
        if (from == kNotYet) break;
        const bool is_forward = a.kind == Kind::kForward;
        const double takes = is_forward ? forward : backward;
        now[rank] = std::max(now[rank], from) + takes;
        (is_forward ? run.forward : run.backward)[a.stage][a.microbatch] = now[rank];
        run.times.busy[rank] += takes;
        kept[rank] += is_forward ? 1 : -1;
        run.times.peak[rank] = std::max(run.times.peak[rank], kept[rank]);
        ++next[rank];
        moved = true;
      }
    }
  }
  for (size_t rank = 0; rank < p; ++rank) {
    if (next[rank] == s.ranks[rank].size()) continue;
    const PipelineAction& a = s.ranks[rank][next[rank]];
    const PipelineAction other = a.kind == Kind::kForward
                                     ? PipelineAction{Kind::kForward, a.stage - 1, a.microbatch}
                                     : PipelineAction{Kind::kBackward, a.stage + 1, a.microbatch};
    return absl::InvalidArgumentError(absl::StrCat(
        "[pipeline schedule] rank ", rank, " waits for ever: its ", TextOf(a), " needs ",
        TextOf(other), ", which rank ", s.RankOf(other.stage), " does not come to"));
  }
  run.times.makespan = *std::max_element(now.begin(), now.end());
  return run;
}

// What one rank sends to another one.
struct Transfer {
  double ready;  // when it is made
  PipelineAction send, recv;
  auto Key() const {
    return std::make_tuple(ready, send.microbatch, send.stage, static_cast<int>(send.kind));
  }
};

std::vector<Transfer> TransfersOf(const PipelineSchedule& s, const Run& run) {
  std::vector<Transfer> all;
  for (int stage = 0; stage + 1 < s.stages; ++stage) {
    if (s.ranks.size() == 1) break;  // neighbours are on one rank
    for (int64_t m = 0; m < s.microbatches; ++m) {
      all.push_back({run.forward[stage][m],
                     {Kind::kSendForward, stage, m},
                     {Kind::kRecvForward, stage + 1, m}});
      all.push_back({run.backward[stage + 1][m],
                     {Kind::kSendBackward, stage + 1, m},
                     {Kind::kRecvBackward, stage, m}});
    }
  }
  std::sort(all.begin(), all.end(),
            [](const Transfer& a, const Transfer& b) { return a.Key() < b.Key(); });
  return all;
}

}  // namespace

std::vector<std::string> PipelineScheduleNames() { return {"GPipe", "1F1B", "Interleaved1F1B"}; }

absl::StatusOr<PipelineSchedule> MakePipelineSchedule(absl::string_view name, int ranks,
                                                      int64_t microbatches, int stages_per_rank) {
  if (ranks < 1 || microbatches < 1 || stages_per_rank < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "[pipeline schedule] ranks, microbatches and stages per rank must be positive, got ", ranks,
        ", ", microbatches, ", ", stages_per_rank));
  }
  constexpr double kMostActions = 1 << 26;
  if (2.0 * ranks * stages_per_rank * static_cast<double>(microbatches) > kMostActions) {
    return absl::InvalidArgumentError(
        absl::StrCat("[pipeline schedule] ", ranks, " ranks with ", stages_per_rank,
                     " stages each and ", microbatches, " microbatches are more than ",
                     static_cast<int64_t>(kMostActions), " forwards and backwards"));
  }
  const std::vector<std::string> names = PipelineScheduleNames();
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    return absl::InvalidArgumentError(absl::StrCat("[pipeline schedule] there is no \"", name,
                                                   "\"; there are ", absl::StrJoin(names, ", ")));
  }
  const int v = stages_per_rank;
  if ((name == "1F1B") != (v == 1) && name != "GPipe") {
    return absl::InvalidArgumentError(absl::StrCat(
        "[pipeline schedule] ", name, " has ", v == 1 ? "several stages" : "one stage",
        " per rank, got ", v, "; ", v == 1 ? "1F1B has one" : "Interleaved1F1B has more"));
  }
  PipelineSchedule schedule = {v * ranks, microbatches, {}};
  for (int r = 0; r < ranks; ++r) {
    const Lists lists = ListsOf(r, ranks, microbatches, v, name == "GPipe" ? microbatches : ranks);
    const auto all = static_cast<int64_t>(lists.forwards.size());
    int64_t ahead = all;
    if (name == "1F1B") ahead = ranks - 1 - r;
    if (name == "Interleaved1F1B") ahead = 2 * (ranks - r - 1) + (v - 1) * ranks;
    schedule.ranks.push_back(Alternating(lists, std::min(ahead, all)));
  }
  const absl::Status fine = CheckPipelineSchedule(schedule);
  if (fine.ok()) return schedule;
  return absl::InvalidArgumentError(absl::StrCat("[pipeline schedule] ", name, " on ", ranks,
                                                 " ranks goes with a number of microbatches that ",
                                                 ranks, " divides, got ", microbatches));
}

std::string ToString(const PipelineSchedule& schedule) {
  std::string text;
  for (const Actions& actions : schedule.ranks) {
    absl::StrAppend(&text,
                    absl::StrJoin(actions, " ",
                                  [](std::string* out, const PipelineAction& a) {
                                    absl::StrAppend(out, TextOf(a));
                                  }),
                    "\n");
  }
  return text;
}

absl::StatusOr<PipelineSchedule> ParsePipelineSchedule(absl::string_view text) {
  PipelineSchedule schedule;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line.substr(0, line.find('#')));
    if (line.empty()) continue;
    Actions actions;
    for (const absl::string_view word :
         absl::StrSplit(line, absl::ByAnyChar(" \t,"), absl::SkipEmpty())) {
      const size_t at = word.find_first_of("FB");
      PipelineAction a = {};
      if (at == word.npos || !absl::SimpleAtoi(word.substr(0, at), &a.stage) ||
          !absl::SimpleAtoi(word.substr(at + 1), &a.microbatch) || a.stage < 0 ||
          a.microbatch < 0 || a.stage >= (1 << 20) || a.microbatch >= (1 << 20)) {
        return absl::InvalidArgumentError(
            absl::StrCat("[pipeline schedule] line ", number, ": \"", word,
                         "\" is no action; \"2F0\" is the forward of microbatch 0 in stage 2, "
                         "\"2B0\" its backward"));
      }
      a.kind = word[at] == 'F' ? Kind::kForward : Kind::kBackward;
      schedule.stages = std::max(schedule.stages, a.stage + 1);
      schedule.microbatches = std::max(schedule.microbatches, a.microbatch + 1);
      actions.push_back(a);
    }
    schedule.ranks.push_back(std::move(actions));
  }
  DT_RETURN_IF_ERROR(CheckPipelineSchedule(schedule));
  return schedule;
}

absl::Status CheckPipelineSchedule(const PipelineSchedule& schedule) {
  return Simulate(schedule, 1, 2).status();
}

absl::StatusOr<PipelineTimes> SimulatePipeline(const PipelineSchedule& schedule, double forward,
                                               double backward) {
  if (!(forward >= 0) || !(backward >= 0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "[pipeline schedule] times must not be negative, got ", forward, " and ", backward));
  }
  DT_ASSIGN_OR_RETURN(Run run, Simulate(schedule, forward, backward));
  return std::move(run.times);
}

absl::StatusOr<std::vector<std::vector<PipelineAction>>> WithTransfers(const PipelineSchedule& s) {
  DT_ASSIGN_OR_RETURN(const Run run, Simulate(s, 1, 2));
  std::vector<Actions> own(s.ranks.size());  // transfers of each rank, in the order of all
  for (const Transfer& t : TransfersOf(s, run)) {
    own[s.RankOf(t.send.stage)].push_back(t.send);
    own[s.RankOf(t.recv.stage)].push_back(t.recv);
  }
  std::vector<Actions> all(s.ranks.size());
  for (size_t rank = 0; rank < s.ranks.size(); ++rank) {
    size_t posted = 0;
    // Posts what comes up to that transfer, if it is one of the rank's.
    const auto post = [&](const PipelineAction& t) {
      const auto at = std::find(own[rank].begin(), own[rank].end(), t);
      if (at == own[rank].end()) return;
      for (; posted <= static_cast<size_t>(at - own[rank].begin()); ++posted) {
        all[rank].push_back(own[rank][posted]);
      }
    };
    for (const PipelineAction& a : s.ranks[rank]) {
      const bool is_forward = a.kind == Kind::kForward;
      post({is_forward ? Kind::kRecvForward : Kind::kRecvBackward, a.stage, a.microbatch});
      all[rank].push_back(a);
      post({is_forward ? Kind::kSendForward : Kind::kSendBackward, a.stage, a.microbatch});
    }
  }
  return all;
}

absl::StatusOr<std::vector<int64_t>> CutEvenly(absl::Span<const double> weights, int64_t parts) {
  const auto n = static_cast<int64_t>(weights.size());
  if (parts < 1 || parts > n) {
    return absl::InvalidArgumentError(
        absl::StrCat("[pipeline] ", n, " layers cannot be cut into ", parts, " parts"));
  }
  std::vector<double> before = {0};  // sums
  for (const double w : weights) {
    if (!(w >= 0) || std::isinf(w)) {
      return absl::InvalidArgumentError(
          absl::StrCat("[pipeline] weights of layers are finite and not negative, got ", w));
    }
    before.push_back(before.back() + w);
  }
  const auto weight = [&](int64_t from, int64_t to) { return before[to] - before[from]; };
  // What the layers from i on come to in k runs that are no heavier than `most`.
  using Table = std::vector<std::vector<double>>;
  const auto table_of = [&](double impossible, double none, double most, auto choose) {
    Table table(static_cast<size_t>(parts + 1),
                std::vector<double>(static_cast<size_t>(n + 1), impossible));
    table[0][n] = none;
    for (int64_t k = 1; k <= parts; ++k) {
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = i + 1; j <= n && weight(i, j) <= most; ++j) {
          if (table[k - 1][j] != impossible) {
            table[k][i] = choose(table[k][i], weight(i, j), table[k - 1][j]);
          }
        }
      }
    }
    return table;
  };
  // The heaviest run, as light as can be; then the lightest one, as heavy as can be.
  const double heaviest = table_of(HUGE_VAL, 0, HUGE_VAL, [](double best, double run, double rest) {
    return std::min(best, std::max(run, rest));
  })[parts][0];
  const Table lightest = table_of(-1, HUGE_VAL, heaviest, [](double best, double run, double rest) {
    return std::max(best, std::min(run, rest));
  });
  std::vector<int64_t> starts = {0};
  for (int64_t k = parts; k > 0; --k) {
    int64_t cut = n;
    const int64_t from = starts.back();
    while (weight(from, cut) > heaviest || weight(from, cut) < lightest[parts][0] ||
           lightest[k - 1][cut] < lightest[parts][0]) {
      --cut;
    }
    starts.push_back(cut);
  }
  return starts;
}

}  // namespace dtensor
