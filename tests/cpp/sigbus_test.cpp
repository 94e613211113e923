// SIGBUS in a process where other libraries install and remove handlers. Signals that are not ours
// must end as they would without us.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>

#include "base/mapping.h"
#include "testing.h"

namespace gdsdata::testing {
namespace {

constexpr int kRecovered = 7;

// A library remembers the handler that it found.
struct Library {
  struct sigaction found{};
  bool enabled = false;
  int calls = 0;
};

// Like Python's faulthandler: restores the handler that it found and raises the signal again.
Library reporter;
void report(int signal_number) {
  if (!reporter.enabled) return;
  if (::write(STDERR_FILENO, "report\n", 7) < 0) std::_Exit(3);
  ::sigaction(signal_number, &reporter.found, nullptr);
  ::raise(signal_number);
}
void enable_reporter() {
  if (std::exchange(reporter.enabled, true)) return;
  struct sigaction action{};
  action.sa_handler = report;
  action.sa_flags = SA_NODEFER;
  ::sigaction(SIGBUS, &action, &reporter.found);
}
void disable_reporter() {
  if (std::exchange(reporter.enabled, false)) ::sigaction(SIGBUS, &reporter.found, nullptr);
}

// A library that passes on every signal, and carelessly installs itself again and again.
Library chainer;
void chain(int signal_number, siginfo_t* info, void* context) {
  if (++chainer.calls > 100) std::_Exit(4);
  if ((chainer.found.sa_flags & SA_SIGINFO) != 0) {
    chainer.found.sa_sigaction(signal_number, info, context);
  } else if (chainer.found.sa_handler != SIG_DFL && chainer.found.sa_handler != SIG_IGN) {
    chainer.found.sa_handler(signal_number);
  } else {
    ::signal(SIGBUS, SIG_DFL);
  }
}
void enable_chainer() {
  struct sigaction action{};
  action.sa_sigaction = chain;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGBUS, &action, &chainer.found);
  chainer.enabled = true;
}
void disable_chainer() {
  if (std::exchange(chainer.enabled, false)) ::sigaction(SIGBUS, &chainer.found, nullptr);
}

void read_file_of_ours() { MappingGuard::install_handler(); }

struct Step {
  const char* name;
  void (*take)();
};
constexpr Step kSteps[] = {{"read", read_file_of_ours},
                           {"enable reporter", enable_reporter},
                           {"disable reporter", disable_reporter},
                           {"enable chainer", enable_chainer},
                           {"disable chainer", disable_chainer}};
constexpr size_t kStepKinds = std::size(kSteps);

std::vector<Step> order_of(size_t number, size_t length) {
  std::vector<Step> order;
  for (size_t i = 0; i < length; ++i, number /= kStepKinds) order.push_back(kSteps[number % kStepKinds]);
  return order;
}

std::string name_of(const std::vector<Step>& order) {
  std::string name;
  for (const Step& step : order) name += std::string(name.empty() ? "" : ", ") + step.name;
  return name;
}

class Sigbus : public ::testing::Test {
 protected:
  struct Ended {
    int status = 0;
    size_t reports = 0;
  };

  // Runs `body` in a child, which is killed after 10 s.
  static Ended in_child(const std::function<void()>& body) {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(10);
      ::dup2(ends[1], STDERR_FILENO);
      ::signal(SIGBUS, SIG_DFL);  // a sanitizer installs one too
      body();
      std::_Exit(0);
    }
    ::close(ends[1]);
    std::string written;
    char part[4096];
    for (ssize_t got = 0; (got = ::read(ends[0], part, sizeof part)) > 0 && written.size() < 100'000;) {
      written.append(part, static_cast<size_t>(got));
    }
    ::close(ends[0]);  // a child that still writes is killed
    Ended ended;
    ::waitpid(child, &ended.status, 0);
    for (size_t at = 0; (at = written.find("report\n", at)) != std::string::npos; ++at) ++ended.reports;
    return ended;
  }

  // Returns the second page of a mapping whose file has only one: a touch raises SIGBUS.
  const std::byte* lost_page() {
    const std::string path = folder_.write("lost", Bytes(8192));
    const int fd = ::open(path.c_str(), O_RDONLY);
    void* mapped = ::mmap(nullptr, 8192, PROT_READ, MAP_SHARED, fd, 0);
    std::filesystem::resize_file(path, 4096);
    ::close(fd);
    return static_cast<const std::byte*>(mapped) + 4096;
  }
  static void touch(const std::byte* page) { static_cast<void>(*const_cast<const volatile std::byte*>(page)); }

  const TemporaryFolder folder_;
};

TEST_F(Sigbus, OfOthersEndsTheProcessOnceReportedInEveryOrder) {
  const std::byte* page = lost_page();
  for (const size_t length : {1, 2, 3, 4}) {
    size_t orders = 1;
    for (size_t i = 0; i < length; ++i) orders *= kStepKinds;
    for (size_t number = 0; number < orders; ++number) {
      const auto order = order_of(number, length);
      const auto is_read = [](const Step& step) { return step.take == read_file_of_ours; };
      if (length == 4 && std::count_if(order.begin(), order.end(), is_read) < 2) continue;  // like a shorter one
      const auto ended_by = [&](const std::function<void()>& raise, bool with_us) {
        return in_child([&] {
          for (const Step& step : order) {
            if (with_us || step.take != read_file_of_ours) step.take();
          }
          raise();
        });
      };
      for (const auto& raise :
           {std::function<void()>([&] { touch(page); }), std::function<void()>([] { ::kill(::getpid(), SIGBUS); })}) {
        const Ended without_us = ended_by(raise, false);
        if (!WIFSIGNALED(without_us.status) || WTERMSIG(without_us.status) != SIGBUS) continue;  // their own bug
        const Ended ended = ended_by(raise, true);
        ASSERT_TRUE(WIFSIGNALED(ended.status) && WTERMSIG(ended.status) == SIGBUS)
            << name_of(order) << ": status " << ended.status;
        ASSERT_EQ(ended.reports, without_us.reports) << name_of(order);
      }
    }
  }
}

TEST_F(Sigbus, OfOursIsAMarkInEveryOrderThatEndsWithARead) {
  for (size_t number = 0; number < kStepKinds * kStepKinds * kStepKinds; ++number) {
    auto order = order_of(number, 3);
    order.push_back(kSteps[0]);
    const std::string path = folder_.write("ours", Bytes(8192, std::byte{1}));
    const auto file = File::open_for_reading(path);
    Mapping& mapping = *file->mapping();
    std::filesystem::resize_file(path, 4096);
    const Ended ended = in_child([&] {
      for (const Step& step : order) step.take();
      MappingGuard guard(mapping);
      touch(mapping.data() + 4096);
      std::_Exit(mapping.lost_from() == 4096 ? kRecovered : 1);
    });
    ASSERT_TRUE(WIFEXITED(ended.status) && WEXITSTATUS(ended.status) == kRecovered) << name_of(order);
    ASSERT_EQ(ended.reports, 0u) << name_of(order);
  }
}

int repairs = 0;
void repair(int, siginfo_t* info, void*) {
  ++repairs;
  ::mmap(reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(info->si_addr) / 4096 * 4096), 4096, PROT_READ,
         MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

TEST_F(Sigbus, OfALibraryThatRepairsItsPagesIsRepairedEachTime) {
  const Ended ended = in_child([&] {
    struct sigaction action{};
    action.sa_sigaction = repair;
    action.sa_flags = SA_SIGINFO;
    ::sigaction(SIGBUS, &action, nullptr);
    for (int round = 0; round < 5; ++round) {
      MappingGuard::install_handler();
      touch(lost_page());
    }
    std::_Exit(repairs == 5 ? kRecovered : 1);
  });
  EXPECT_TRUE(WIFEXITED(ended.status) && WEXITSTATUS(ended.status) == kRecovered) << ended.status;
}

}  // namespace
}  // namespace gdsdata::testing
