// BackgroundWorker: a thread that follows runs (background_pipeline.h), and owns all it uses.
//
// The destructor does not wait for a peer: a thread that does goes on by itself, and ends with its wait. In a forked
// child, which has neither the thread nor, for certain, its lock, both are leaked.
#pragma once

#include <unistd.h>

#include <chrono>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include <ATen/Parallel.h>

#include "c10d/threads/bounded_thread.h"
#include "kfac/base/background_pipeline.h"
#include "kfac/base/engine_guards.h"

namespace torchext {

template <class Result>
class BackgroundWorker {
 public:
  BackgroundWorker(std::string name, std::function<void()> look)
      : runs_(std::make_shared<BackgroundPipeline<Result>>(std::move(look))),
        thread_(std::move(name),
                [runs = runs_] {
                  at::init_num_threads();  // as many as the script has chosen
                  const EngineGuards guards;
                  runs->work();
                }),
        creator_(getpid()) {}
  ~BackgroundWorker() {
    if (getpid() != creator_) {
      thread_.abandon();
      static_cast<void>(new (std::nothrow) std::shared_ptr<BackgroundPipeline<Result>>(runs_));
      return;
    }
    runs_->close();
    // What it makes takes no longer, as a rule.
    thread_.finish(std::chrono::milliseconds(200));
  }
  BackgroundWorker(const BackgroundWorker&) = delete;
  BackgroundWorker& operator=(const BackgroundWorker&) = delete;

  BackgroundPipeline<Result>* operator->() const { return runs_.get(); }

 private:
  const std::shared_ptr<BackgroundPipeline<Result>> runs_;
  BoundedThread thread_;
  const int creator_;  // process
};

}  // namespace torchext
