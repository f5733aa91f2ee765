"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const form = document.getElementById("choice");
  const answer = document.getElementById("answer");
  const here = new URL(".", location.href).href;
  // Where nobody told the index's address, it is this page's.
  const told = (line) => (data.place ? line.split(data.place).join(here) : line);

  // Word by word, so that a line breaks between words where it can.
  function write(code, line) {
    const words = told(line).split(" ").map((word) => {
      const made = document.createElement("span");
      made.textContent = word;
      return made;
    });
    code.replaceChildren(...words.flatMap((word) => [word, " "]).slice(0, -1));
  }

  function element(name, text, parent) {
    const made = document.createElement(name);
    made.textContent = text;
    parent.append(made);
    return made;
  }

  async function copy(button, code, title) {
    function say(word) {
      button.textContent = word;
      button.setAttribute("aria-label", word + " the line for " + title);
    }
    try {
      await navigator.clipboard.writeText(code.textContent);
      say("Copied");
    } catch {
      // No clipboard without https: mark the line, to be copied by hand.
      getSelection().selectAllChildren(code);
      say("Marked");
    }
    setTimeout(say, 2000, "Copy");
  }

  function command(title, line, parent) {
    element("h3", title, parent);
    const row = element("div", "", parent);
    row.className = "command";
    const code = element("code", "", row);
    write(code, line);
    const button = element("button", "Copy", row);
    button.type = "button";
    button.setAttribute("aria-label", "Copy the line for " + title);
    button.addEventListener("click", () => copy(button, code, title));
  }

  function show() {
    const picked = new FormData(form);
    const key = ["gpu", "cuda", "torch", "package"].map((name) => picked.get(name)).join("|");
    const found = data.answers[key];
    answer.replaceChildren();
    for (const offer of found.offers) {
      for (const file of offer.files) {
        const told = element("p", "", answer);
        element("a", file, told).href = "#wheel-" + data.wheels[file].row;
        told.append(": " + data.wheels[file].words);
      }
      if (offer.note) element("p", offer.note, answer).className = "flaw";
      command("pip", offer.lines.pip, answer);
      command("uv", offer.lines.uv, answer);
      if (offer.lines.uv_variants) command("uv with wheel variants", offer.lines.uv_variants, answer);
    }
    if (found.note) element("p", found.note, answer);
  }

  for (const code of document.querySelectorAll("code.line")) write(code, code.textContent);
  form.addEventListener("change", show);
  document.getElementById("picker").hidden = false;
  show();
})();
