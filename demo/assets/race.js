// The replay of a race, and the keys of the token view. Nothing is measured here: times come with the tokens.
(() => {
  "use strict";
  let frame = 0;

  const arms = () => [...document.querySelectorAll("#arena .arm")];
  const tokens = (arm) => [...arm.querySelectorAll(".tok")];

  function figure(arm, name, value) {
    const place = arm.querySelector(`[data-figure="${name}"] dd`);
    if (place) place.textContent = value;
  }

  function stop() {
    cancelAnimationFrame(frame);
    frame = 0;
    for (const arm of arms()) {
      arm.classList.remove("replaying");
      for (const token of tokens(arm)) token.classList.remove("later");
    }
  }

  // Scrolls the text, and never the page, so that a token is in sight.
  function follow(token) {
    const box = token.closest(".tokens");
    if (!box) return; // drawn anew in the meantime
    const below = token.offsetTop + token.offsetHeight - box.offsetTop - box.clientHeight;
    if (below > box.scrollTop) box.scrollTop = below + 8;
  }

  // While a race runs the page draws each text anew: show its end.
  function followRunning() {
    if (frame) return;
    for (const arm of arms()) {
      const last = tokens(arm).at(-1);
      if (last) follow(last);
    }
  }

  // All arms side by side, each token at the time at which it came.
  function play(speed) {
    stop();
    const lanes = arms()
      .map((arm) => ({
        arm,
        toks: tokens(arm),
        times: tokens(arm).map((token) => Number(token.dataset.t)),
        end: Number(arm.dataset.end),
        figure: arm.querySelector('[data-figure="tokens-per-s"] dd')?.textContent ?? "",
        state: arm.querySelector(".state"),
        fill: arm.querySelector(".fill"),
        shown: 0,
      }))
      .filter((lane) => lane.end > 0 && lane.toks.length > 0);
    if (!lanes.length) return;
    const rate = Number(speed) || 1;
    const longest = Math.max(...lanes.map((lane) => lane.end));
    const places = [...lanes].sort((a, b) => a.end - b.end);
    for (const lane of lanes) {
      lane.arm.classList.add("replaying");
      lane.word = lane.state.dataset.state;
      for (const token of lane.toks) token.classList.add("later");
    }
    document.querySelector("#arena .arena").dataset.replay = "running";
    const began = performance.now();

    function step() {
      // The next race has begun: its texts have taken the place of these.
      if (!lanes[0].arm.isConnected) return stop();
      const now = (performance.now() - began) * rate;
      for (const lane of lanes) {
        const before = lane.shown;
        while (lane.shown < lane.times.length && lane.times[lane.shown] <= now) {
          lane.toks[lane.shown++].classList.remove("later");
        }
        if (lane.shown > before) follow(lane.toks[lane.shown - 1]);
        lane.fill.style.width = `${(100 * lane.shown) / lane.times.length}%`;
        const isOver = now >= lane.end;
        lane.state.textContent = isOver ? `${lane.word}, ${(lane.end / 1000).toFixed(2)} s` : `${(now / 1000).toFixed(1)} s`;
        figure(lane.arm, "tokens-per-s", isOver || !lane.shown ? lane.figure : ((lane.shown * 1000) / now).toFixed(1));
        lane.arm.dataset.place = isOver && lanes.length > 1 ? String(places.indexOf(lane) + 1) : "";
      }
      if (now < longest) {
        frame = requestAnimationFrame(step);
        return;
      }
      stop();
      const root = document.querySelector("#arena .arena");
      if (root) root.dataset.replay = "over";
    }
    frame = requestAnimationFrame(step);
  }

  // After a race the page may not have drawn the last tokens yet.
  function playWhenDrawn(speed, tries = 40) {
    const root = document.querySelector("#arena .arena");
    if (root?.dataset.over === "true") {
      requestAnimationFrame(() => play(speed));
    } else if (tries > 0) {
      setTimeout(() => playWhenDrawn(speed, tries - 1), 100);
    }
  }

  function inspect(token) {
    const arm = token.closest(".arm");
    for (const other of arm.querySelectorAll(".tok.current")) other.classList.remove("current");
    token.classList.add("current");
    const inspector = arm.querySelector(".inspector");
    inspector.setAttribute("aria-live", "polite"); // not before: while a race runs the page draws it anew
    inspector.textContent = `${JSON.stringify(token.textContent)}: ${token.title}`;
  }

  document.addEventListener("mouseover", (event) => {
    const token = event.target.closest?.("#arena .tok");
    if (token) inspect(token);
  });
  document.addEventListener("click", (event) => {
    const token = event.target.closest?.("#arena .tok");
    if (token) inspect(token);
  });
  document.addEventListener("keydown", (event) => {
    const area = event.target.closest?.("#arena .tokens");
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!area || !by) return;
    const all = [...area.querySelectorAll(".tok")];
    if (!all.length) return;
    const at = all.findIndex((token) => token.classList.contains("current"));
    const next = Math.min(Math.max(at + by, 0), all.length - 1);
    inspect(all[next]);
    all[next].scrollIntoView({ block: "nearest" });
    event.preventDefault();
  });

  // The texts are not there yet when this script is read.
  const watch = setInterval(() => {
    const place = document.querySelector("#arena");
    if (!place) return;
    clearInterval(watch);
    new MutationObserver((changes) => {
      if (changes.some((change) => change.addedNodes.length)) followRunning();
    }).observe(place, { childList: true, subtree: true });
  }, 200);

  window.ssdRace = { play: playWhenDrawn };
})();
